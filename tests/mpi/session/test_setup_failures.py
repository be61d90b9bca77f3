"""One rank fails, at every stage of a set-up: all ranks get the same error."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from tests.helpers.faults.raising import (
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
    raises_everywhere,
    raising,
)
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, require_memory_works, ring_in_host, to_host


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


def take_small_fd(segment: host_memory.HostSegment) -> Descriptor:
    """Take the descriptor of a segment, and return one of less memory."""
    TAKE_FD(segment).close()
    return host_memory.memfd_create(8)


TAKE_FD = host_memory.HostSegment.take_fd


def lose_writes(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
    view = backend.view
    patch.setattr(backend, "view", lambda self, *arguments: view(self, *arguments).copy())


SYSTEM: dict[str, Break] = {
    "memfd_create": attribute(os, "memfd_create"),
    "ftruncate": attribute(os, "ftruncate"),
    "fcntl": attribute(fcntl, "fcntl"),
    "mmap": attribute(host_memory, "_map"),
}
PEERS: dict[str, Break] = {"listen": attribute(FdExchange, "__init__"), "map": attribute(host_memory, "map_shared")}
OPEN: dict[str, Break] = {"open": backend_method("open")}
WRONG: dict[str, Break] = {
    "small": lambda patch, *_: patch.setattr(host_memory.HostSegment, "take_fd", take_small_fd),
    "not sealed": lambda patch, *_: patch.setattr(host_memory, "_SEALS", fcntl.F_SEAL_GROW),  # it can shrink
}
OPEN_EVENT: dict[str, Break] = {"open event": backend_method("open_event")}
EXPORT_EVENT: dict[str, Break] = {"export event": attribute(host.HostEvent, "export")}
LOOK: dict[str, Break] = {
    "node": attribute(placement, "node_key"),
    "bind": attribute(placement.Placement, "create_backend"),
    "prepare": attribute(secrets, "randbits"),
    "write and read": synchronize(once=False),
    "lost reads": lambda patch, backend, error: patch.setattr(backend, "copy", lambda *_: None),
}
LOST_WRITES: dict[str, Break] = {"lost writes": lose_writes}
SAID = {
    "small": "memory of rank {0}: shared memory has 8 bytes",
    "not sealed": "memory of rank {0}: .* is not sealed",
    "lost writes": "a word of rank {0} did not arrive in this rank's",
    "lost reads": "failed on rank {0}: rank 0's memory reads 0 instead of ",
}
"""Errors other than the error that is injected."""
ONLY_CPU = SYSTEM | PEERS | WRONG | EXPORT_EVENT  # the others have no such functions
ONLY_PEERS = PEERS | OPEN | WRONG | OPEN_EVENT | LOST_WRITES
ERRORS = [HandleError, OSError, MemoryError, KeyError]

Failing = tuple[Callable[[], object], Callable[[], object]]
"""A call that fails on all ranks, and a check that its communicator works afterwards."""
Rig = Callable[[mpicomm.Communicator], Failing]


def array(comm: mpicomm.Communicator) -> Failing:
    kept = comm.zeros(1, np.int64)

    def works() -> None:
        require_memory_works(comm)
        following, previous = ring_in_host(comm)
        with comm.zeros(1) as another:  # the counters of both arrays are in step on all ranks
            for each in (kept, another):
                each.signal(following)
                each.wait_signal(previous)
            comm.check()

    return lambda: comm.zeros(1000), works


def first_array(comm: mpicomm.Communicator) -> Failing:
    return lambda: comm.zeros(1000), lambda: require_memory_works(comm)


def array_of_a_child(comm: mpicomm.Communicator) -> Failing:
    require_memory_works(comm)
    child = comm.Dup()

    def works() -> None:
        require_memory_works(child)
        child.Free()

    return lambda: child.zeros(3), works


def another_communicator(comm: mpicomm.Communicator) -> Failing:
    device = "cpu" if comm.device == "cpu" else "cuda"

    def works() -> None:
        with communicator(device) as made:
            require_memory_works(made)

    return lambda: communicator(device), works


def event(comm: mpicomm.Communicator) -> Failing:
    def works() -> None:
        event = comm.shared_event()
        event.record()
        event.wait((comm.rank + 1) % comm.size)
        comm.check()

    return comm.shared_event, works


def close(comm: mpicomm.Communicator) -> Failing:
    arrays = [comm.zeros(3) for _ in EVERY_RANK]
    left = iter(arrays)

    def works() -> None:
        assert [each.closed for each in arrays] == [True] * len(arrays)
        require_memory_works(comm)

    return lambda: next(left).close(), works


@contextmanager
def made(name: str, device: str) -> Iterator[Failing]:
    """The rig of a case, on two hosts if its name says so."""
    with pytest.MonkeyPatch.context() as patch:
        if "hosts" in name:
            patch.setenv("MPICOMM_HOSTID", f"host {WORLD.rank % 2}")
        with communicator(device) as comm:
            yield CASES[name][0](comm)


CASES: dict[str, tuple[Rig, dict[str, Break]]] = {
    "array": (array, ALLOCATE | ZERO | VIEW | OPEN | SYSTEM | PEERS | WRONG),
    "first_array": (first_array, ALLOCATE | OPEN),
    "array_of_a_child": (array_of_a_child, {"bind": LOOK["bind"]}),
    "communicator": (another_communicator, ALLOCATE | VIEW | OPEN | LOOK | LOST_WRITES | SYSTEM | PEERS),
    "event": (event, {"create event": backend_method("create_event")} | OPEN_EVENT | EXPORT_EVENT),
    "close": (close, {"synchronize": synchronize(once=True)}),
    "array_on_two_hosts": (array, ALLOCATE | ZERO | VIEW),
    "first_array_on_two_hosts": (first_array, ALLOCATE | ZERO | VIEW),
}


@functools.cache
def use_once(name: str) -> None:
    """Make what CUDA and NCCL keep until the process ends, so that it is no leak of the first test."""
    with made(name, "cuda") as (_, works):
        if name != "close":  # whose arrays are still open
            works()


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(
            name,
            stage,
            marks=[pytest.mark.mpi(min_size=2)] if stage in ONLY_PEERS or "hosts" in name else [],
        )
        for name, (_, stages) in CASES.items()
        for stage in stages
    ],
)
def test_what_fails_on_one_rank_fails_on_all(device: str, name: str, stage: str) -> None:
    device = "cpu" if stage in ONLY_CPU else device
    break_ = CASES[name][1][stage]
    if device == "cuda":
        use_once(name)
    with nothing_leaks(), made(name, device) as (call, works):
        # A host on which no rank fails keeps the counters of a first array.
        with contextlib.nullcontext() if "hosts" in name else nothing_leaks():
            # Each rank has another error, and other ones at each stage.
            for culprit, error in zip(EVERY_RANK, itertools.cycle([*ERRORS, *ERRORS][len(stage) % 4 :]), strict=False):
                with fails_everywhere(culprit, device, break_, error, match=SAID.get(stage, "").format(culprit)):
                    call()
        works()


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
