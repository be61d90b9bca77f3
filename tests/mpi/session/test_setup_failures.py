"""One rank fails, at every stage of a set-up: all ranks get the same error."""

from __future__ import annotations

import fcntl
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError, MpicommError, PeerError
from mpicomm.cluster import placement
from mpicomm.devices import host, host_memory
from mpicomm.devices.handle import Descriptor
from mpicomm.sharing import choose_handle
from mpicomm.sharing.fd_exchange import FdExchange
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.faults.setup_failures import (
    ALLOCATE,
    EVERY_RANK,
    FIRST_AND_LAST,
    VIEW,
    WORLD,
    ZERO,
    Break,
    attribute,
    backend_method,
    broken,
    fails_everywhere,
    raising,
)
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, require_memory_works, to_host


def synchronize(*, once: bool) -> Break:
    """Return a break of the backend's wait. The wait ends before it fails, because pending work may use the memory."""

    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        real = backend.synchronize

        def fail(self: Any, *arguments: Any) -> Any:
            real(self, *arguments)
            if once:
                patch.setattr(backend, "synchronize", real)
            raising(error)()

        patch.setattr(backend, "synchronize", fail)

    return break_


OPEN = {"open": backend_method("open")}  # of the peers' memory, if there are peers
SYSTEM = {
    "memfd_create": attribute(os, "memfd_create"),
    "ftruncate": attribute(os, "ftruncate"),
    "fcntl": attribute(fcntl, "fcntl"),
    "mmap": attribute(host_memory, "_map"),
}
LISTEN = {"listen": attribute(FdExchange, "__init__")}
MAP = {"map": attribute(host_memory, "map_shared")}

ERRORS = [HandleError, OSError, MemoryError, KeyError]


def culprits(stage: str) -> Iterator[tuple[int, type[BaseException]]]:
    """Yield each rank, and the error that it has: others on each rank, and at each stage."""
    at = len(stage)
    return zip(EVERY_RANK, itertools.islice(itertools.cycle(ERRORS), at, None), strict=False)


def require_array_fails(device: str, stage: str) -> None:
    with communicator(device) as comm:
        kept = comm.zeros(1, np.int64)
        with nothing_leaks():
            for culprit, error in culprits(stage):
                with fails_everywhere(culprit, device, STAGES[stage], error):
                    comm.zeros(1000)
        require_memory_works(comm)
        # The counters of both arrays are in step on all ranks.
        with comm.zeros(1) as another:
            for array in (kept, another):
                array.signal((comm.rank + 1) % comm.size)
                array.wait_signal((comm.rank - 1) % comm.size)
            comm.check()


def require_first_array_fails(device: str, stage: str) -> None:
    for culprit, error in culprits(stage):
        with communicator(device) as comm:
            with nothing_leaks(), fails_everywhere(culprit, device, STAGES[stage], error):
                comm.zeros(1000)
            require_memory_works(comm)


def require_communicator_fails(device: str, stage: str) -> None:
    for culprit, error in culprits(stage):
        with nothing_leaks(), fails_everywhere(culprit, device, STAGES[stage], error):
            communicator(device)
    with communicator(device) as comm:
        require_memory_works(comm)


LOOK = {
    "node": attribute(placement, "node_key"),
    "bind": attribute(placement.Placement, "create_backend"),
    "prepare": attribute(secrets, "randbits"),
    "write and read": synchronize(once=False),
}
STAGES = ALLOCATE | ZERO | VIEW | OPEN | LOOK | SYSTEM | LISTEN | MAP
OF_HOST = SYSTEM | LISTEN | MAP
CASES: list[tuple[Callable[[str, str], None], dict[str, Break]]] = [
    (require_array_fails, ALLOCATE | ZERO | VIEW | OPEN | OF_HOST),
    (require_first_array_fails, ALLOCATE | OPEN),
    (require_communicator_fails, ALLOCATE | VIEW | OPEN | LOOK | OF_HOST),
]


@pytest.mark.parametrize(
    ("require", "stage"),
    [
        pytest.param(
            require,
            stage,
            marks=[pytest.mark.mpi(min_size=2)] if stage in OPEN | LISTEN | MAP else [],
            id=f"{require.__name__.removeprefix('require_')}-{stage}",
        )
        for require, stages in CASES
        for stage in stages
    ],
)
def test_what_fails_on_one_rank_fails_on_all(device: str, require: Callable[[str, str], None], stage: str) -> None:
    require("cpu" if stage in OF_HOST else device, stage)


def test_child_that_fails_on_one_rank_fails_on_all(own_comm: mpicomm.Communicator, device: str) -> None:
    with own_comm.Dup() as child:
        for culprit in EVERY_RANK:
            break_ = attribute(placement.Placement, "create_backend")
            with nothing_leaks(), fails_everywhere(culprit, device, break_):
                child.zeros(3)
        require_memory_works(child)


@pytest.mark.parametrize(
    ("stage", "break_"),
    [
        ("create", backend_method("create_event")),
        pytest.param("open", backend_method("open_event"), marks=pytest.mark.mpi(min_size=2)),
        ("export", attribute(host.HostEvent, "export")),
    ],
)
def test_event_that_fails_on_one_rank_fails_on_all(device: str, stage: str, break_: Break) -> None:
    if stage == "export":
        device = "cpu"  # the others have no such method
    with communicator(device) as comm:
        with nothing_leaks():
            for culprit, error in culprits(stage):
                with fails_everywhere(culprit, device, break_, error):
                    comm.shared_event()
        event = comm.shared_event()
        event.record()
        event.wait((comm.rank + 1) % comm.size)
        comm.check()


def test_close_that_fails_on_one_rank_fails_on_all(device: str) -> None:
    with nothing_leaks(), communicator(device) as comm:
        for culprit in EVERY_RANK:
            array = comm.zeros(3)
            with fails_everywhere(culprit, device, synchronize(once=True)):
                array.close()
            assert array.closed
            require_memory_works(comm)


# A rank that fails in the exchange sends no descriptors: the others wait half of their deadline for them.
@pytest.mark.mpi(min_size=2)
def test_exchange_that_fails_on_one_rank_fails_on_all(comm_world: MPI.Intracomm) -> None:
    swap = attribute(FdExchange, "swap")
    with communicator("cpu", timeout_s=stretched(1.0)) as comm:
        kept = comm.zeros(1)
        with nothing_leaks():
            for culprit in EVERY_RANK:
                said = f"open failed on .*(rank {culprit}: OSError: .*injected|local ranks .{culprit}. in time)"
                with broken(culprit, "cpu", swap), raises_everywhere(WORLD, MpicommError, match=said):
                    comm.zeros(3)
        require_memory_works(comm)
        kept.close()
    for culprit in FIRST_AND_LAST:
        fails = raises_everywhere(WORLD, MpicommError, match=f"rank {culprit}: OSError: .*injected")
        with nothing_leaks(), broken(culprit, "cpu", swap), fails:
            communicator("cpu", timeout_s=stretched(1.0))


@pytest.fixture
def two_hosts(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    monkeypatch.setenv("MPICOMM_HOSTID", f"host {WORLD.rank % 2}")
    with communicator(device) as comm:
        yield comm


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("break_", (ALLOCATE | ZERO | VIEW).values(), ids=ALLOCATE | ZERO | VIEW)
def test_failure_on_one_host_is_a_failure_on_both(
    no_leaks: None, two_hosts: mpicomm.Communicator, device: str, break_: Break
) -> None:
    for prepare in (lambda: None, lambda: two_hosts.zeros(1)):  # first the array needs counters, then there are some
        prepare()
        for culprit in EVERY_RANK:
            with fails_everywhere(culprit, device, break_):
                two_hosts.zeros(3)
        require_memory_works(two_hosts)


DIFFERENT: dict[str, tuple[str, str]] = {
    "empty, zeros": ("empty", "zeros"),
    "zeros, shared_event": ("zeros", "shared_event"),
    "zeros, close": ("zeros", "close first"),
    "close, close": ("close first", "close second"),
    "close, close event": ("close first", "close event"),
    "close, Free": ("close second", "Free"),
    "zeros, Free": ("zeros", "Free"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("of_others", "of_culprit"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_call_different_things_are_told_so(device: str, of_others: str, of_culprit: str) -> None:
    with communicator(device) as comm:
        first, second, event = comm.zeros(1, np.int64), comm.zeros(1, np.int64), comm.shared_event()
        calls: dict[str, tuple[Callable[[], object], str]] = {
            "empty": (lambda: comm.empty(3), "empty"),
            "zeros": (lambda: comm.zeros(3), "zeros"),
            "shared_event": (comm.shared_event, "shared_event"),
            "close first": (first.close, "SymmetricArray 0: close"),
            "close second": (second.close, "SymmetricArray 1: close"),
            "close event": (event.close, "SharedEvent 2: close"),
            "Free": (comm.Free, "Free"),
        }
        for culprit in FIRST_AND_LAST:
            said = [calls[of_culprit if rank == culprit else of_others][1] for rank in EVERY_RANK]
            said = [f"rank {rank}: {each}" for rank, each in enumerate(said)]
            with raises_everywhere(WORLD, PeerError, match="ranks called different things: " + ".*; ".join(said)):
                calls[of_culprit if WORLD.rank == culprit else of_others][0]()
            # Nothing has changed on any rank.
            assert [first.closed, second.closed, event.closed] == [False] * 3
            for array in (first, second):
                array.local[0] = comm.rank
                array.signal((comm.rank + 1) % comm.size)
                array.wait_signal((comm.rank - 1) % comm.size)
                comm.check()
                assert int(to_host(array.peer((comm.rank - 1) % comm.size))[0]) == (comm.rank - 1) % comm.size
            require_memory_works(comm)
        first.close()
        event.close()


def take_small_fd(segment: host_memory.HostSegment) -> Descriptor:
    """Take the descriptor of a segment, and return one of less memory."""
    TAKE_FD(segment).close()
    return host_memory.memfd_create(8)


TAKE_FD = host_memory.HostSegment.take_fd
REFUSED: dict[str, Break] = {
    "shared memory has 8 bytes": lambda patch, *_: patch.setattr(host_memory.HostSegment, "take_fd", take_small_fd),
    ".* is not sealed": lambda patch, *_: patch.setattr(host_memory, "_SEALS", fcntl.F_SEAL_GROW),  # it can shrink
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("said", REFUSED)
def test_descriptor_of_wrong_memory_is_refused_by_all(comm_world: MPI.Intracomm, said: str) -> None:
    with communicator("cpu") as comm:
        kept = comm.zeros(1)
        for culprit in EVERY_RANK:
            text = f"memory of rank {culprit}: {said}"
            with nothing_leaks(), fails_everywhere(culprit, "cpu", REFUSED[said], match=text):
                comm.empty(1000)
        require_memory_works(comm)
        kept.close()


def lose_writes(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
    view = backend.view
    patch.setattr(backend, "view", lambda self, *arguments: view(self, *arguments).copy())


def lose_reads(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
    patch.setattr(backend, "copy", lambda *_: None)


@pytest.mark.parametrize(
    ("break_", "said"),
    [
        pytest.param(
            lose_writes, "a word of rank {0} did not arrive in this rank's", marks=pytest.mark.mpi(min_size=2)
        ),
        (lose_reads, "failed on rank {0}: rank 0's memory reads 0 instead of "),
    ],
)
def test_memory_that_is_not_shared_is_found_by_the_probe(device: str, break_: Break, said: str) -> None:
    for culprit in EVERY_RANK:
        with nothing_leaks(), fails_everywhere(culprit, device, break_, match=said.format(culprit)):
            communicator(device)


@pytest.mark.mpi(min_size=2)
def test_ranks_of_a_node_that_open_no_memory_of_each_other_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(node: Any, backend: Any, kind: Any) -> None:
        def fail() -> None:
            if WORLD.rank == 1:
                raise HandleError("permission denied")

        node.agree("probe", fail)

    monkeypatch.setattr(choose_handle, "probe", probe)
    with pytest.raises(HandleError, match=r"no handle kind works.*permission denied.*another MPICOMM_HOSTID") as raised:
        communicator("cpu")
    assert raised.value.ranks == (1,)
