"""What all ranks get when one of them fails, does not come, or does something else, at every stage of a set-up."""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, HandleError, MpicommError, PeerError, bootstrap, placement
from mpicomm.backend import host
from mpicomm.fd_exchange import FdExchange
from mpicomm.handle import MemoryHandle
from tests.helpers.communicators import communicator, require_memory_works, to_host
from tests.helpers.leaks import nothing_leaks
from tests.helpers.raising import raises_everywhere

WORLD = MPI.COMM_WORLD
EVERY_RANK = range(WORLD.size)
FIRST_AND_LAST = sorted({0, WORLD.size - 1})

# Makes a stage raise the error; gets the class of the backend.
Break = Callable[[pytest.MonkeyPatch, Any, type[BaseException]], None]


def raising(error: type[BaseException]) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise OSError(5, "injected") if error is OSError else error("injected")

    return fail


def backend_method(name: str) -> Break:
    return lambda patch, backend, error: patch.setattr(backend, name, raising(error))


def of(owner: Any, name: str) -> Break:
    return lambda patch, backend, error: patch.setattr(owner, name, raising(error))


def backend_of(device: str) -> Any:
    if device == "cpu":
        return host.HostBackend
    from mpicomm.backend.cuda import CudaBackend

    return CudaBackend


@contextmanager
def broken(culprit: int, device: str, break_: Break, error: type[BaseException] = OSError) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if WORLD.rank == culprit:
            break_(patch, backend_of(device), error)
        yield


def fails_everywhere(culprit: int) -> AbstractContextManager[Any]:
    return raises_everywhere(WORLD, HandleError, match=f"failed on rank {culprit}: .*injected")


ALLOCATE = {
    "allocate": backend_method("allocate"),
    "export": backend_method("export"),
    "pack": of(MemoryHandle, "pack"),
}
OPEN = {"open": backend_method("open")}  # of the peers' memory, where there are peers
VIEW = {"view": backend_method("view")}
ZERO = {"zero": backend_method("zero")}
SYSTEM = {
    "memfd_create": of(os, "memfd_create"),
    "ftruncate": of(os, "ftruncate"),
    "fcntl": of(fcntl, "fcntl"),
    "mmap": of(host, "_map"),
}
LISTEN = {"listen": of(FdExchange, "__init__")}
MAP = {"map": of(host, "map_shared")}

ERRORS = [HandleError, OSError, MemoryError, KeyError]


def stages(*tables: dict[str, Break]) -> pytest.MarkDecorator:
    names = [(name, break_) for table in tables for name, break_ in table.items()]
    return pytest.mark.parametrize("break_", [break_ for _, break_ in names], ids=[name for name, _ in names])


with_every_error = pytest.mark.parametrize("error", ERRORS, ids=[error.__name__ for error in ERRORS])


def require_array_fails(device: str, break_: Break, error: type[BaseException] = OSError) -> None:
    with communicator(device) as comm:
        kept = comm.zeros(1, np.int64)
        with nothing_leaks():
            for culprit in EVERY_RANK:
                with broken(culprit, device, break_, error), fails_everywhere(culprit):
                    comm.zeros(1000)
        require_memory_works(comm)
        # The counters of both arrays are in step on all ranks.
        with comm.zeros(1) as another:
            for array in (kept, another):
                array.signal((comm.rank + 1) % comm.size)
                array.wait_signal((comm.rank - 1) % comm.size)
            comm.check()


def require_first_array_fails(device: str, break_: Break, error: type[BaseException] = OSError) -> None:
    for culprit in EVERY_RANK:
        with communicator(device) as comm:
            with nothing_leaks(), broken(culprit, device, break_, error), fails_everywhere(culprit):
                comm.zeros(1000)
            require_memory_works(comm)


def require_communicator_fails(device: str, break_: Break, error: type[BaseException] = OSError) -> None:
    for culprit in EVERY_RANK:
        with nothing_leaks(), broken(culprit, device, break_, error), fails_everywhere(culprit):
            communicator(device)
    with communicator(device) as comm:
        require_memory_works(comm)


@with_every_error
@stages(ALLOCATE, ZERO, VIEW)
def test_array_that_fails_on_one_rank_fails_on_all(device: str, break_: Break, error: type[Exception]) -> None:
    require_array_fails(device, break_, error)


@pytest.mark.mpi(min_size=2)
@with_every_error
@stages(OPEN)
def test_array_that_one_rank_cannot_open_fails_on_all(device: str, break_: Break, error: type[Exception]) -> None:
    require_array_fails(device, break_, error)


@stages(ALLOCATE)
def test_first_array_that_fails_on_one_rank_fails_on_all(device: str, break_: Break) -> None:
    require_first_array_fails(device, break_)


@stages(ALLOCATE, VIEW)
def test_communicator_that_fails_on_one_rank_fails_on_all(device: str, break_: Break) -> None:
    require_communicator_fails(device, break_)


@pytest.mark.mpi(min_size=2)
@stages(OPEN)
def test_first_use_that_one_rank_cannot_open_fails_on_all(device: str, break_: Break) -> None:
    require_first_array_fails(device, break_)
    require_communicator_fails(device, break_)


@stages(SYSTEM)
def test_host_memory_that_one_rank_cannot_have_fails_on_all(comm_world: MPI.Intracomm, break_: Break) -> None:
    require_array_fails("cpu", break_)
    require_communicator_fails("cpu", break_)


@pytest.mark.mpi(min_size=2)
@with_every_error
@stages(LISTEN, MAP)
def test_host_memory_that_one_rank_cannot_exchange_fails_on_all(
    comm_world: MPI.Intracomm, break_: Break, error: type[Exception]
) -> None:
    require_array_fails("cpu", break_, error)
    require_communicator_fails("cpu", break_, error)


@stages(
    {
        "node": of(placement, "node_key"),
        "bind": of(placement.Placement, "create_backend"),
        "prepare": of(secrets, "randbits"),
        "write and read": backend_method("synchronize"),
    }
)
def test_communicator_that_cannot_look_around_on_one_rank_fails_on_all(device: str, break_: Break) -> None:
    require_communicator_fails(device, break_)


def test_child_that_fails_on_one_rank_fails_on_all(comm: mpicomm.Communicator, device: str) -> None:
    with comm.Dup() as child:
        for culprit in EVERY_RANK:
            break_ = of(placement.Placement, "create_backend")
            with nothing_leaks(), broken(culprit, device, break_), fails_everywhere(culprit):
                child.zeros(3)
        require_memory_works(child)


def test_children_that_fail_leave_no_communicator_behind() -> None:
    # Alone, because it is faster: an MPI has room for some thousands.
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm, comm.Dup() as child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement.Placement, "create_backend", raising(OSError))
            for _ in range(3000):
                with pytest.raises(HandleError, match="injected"):
                    child.zeros(3)
        require_memory_works(child)


@stages(
    {
        "create": backend_method("create_event"),
        "export": of(host.HostEvent, "export"),
    }
)
def test_host_event_that_fails_on_one_rank_fails_on_all(comm_world: MPI.Intracomm, break_: Break) -> None:
    require_event_fails("cpu", break_)


@pytest.mark.mpi(min_size=2)
@stages({"create": backend_method("create_event"), "open": backend_method("open_event")})
def test_event_that_fails_on_one_rank_fails_on_all(device: str, break_: Break) -> None:
    require_event_fails(device, break_)


def require_event_fails(device: str, break_: Break) -> None:
    with communicator(device) as comm:
        with nothing_leaks():
            for culprit in EVERY_RANK:
                for error in ERRORS:
                    with broken(culprit, device, break_, error), fails_everywhere(culprit):
                        comm.shared_event()
        event = comm.shared_event()
        event.record()
        event.wait((comm.rank + 1) % comm.size)
        comm.check()


def once(name: str) -> Break:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        real = getattr(backend, name)

        def fail_once(self: Any, *arguments: Any) -> Any:
            patch.setattr(backend, name, real)
            raising(error)()

        patch.setattr(backend, name, fail_once)

    return break_


def test_close_that_fails_on_one_rank_fails_on_all(device: str) -> None:
    with nothing_leaks(), communicator(device) as comm:
        for culprit in EVERY_RANK:
            array = comm.zeros(3)
            with broken(culprit, device, once("synchronize")), fails_everywhere(culprit):
                array.close()
            assert array.closed
            require_memory_works(comm)


# What a rank sends is not what it should be


def damaged(damage: Callable[[bytes], bytes]) -> Break:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        pack = MemoryHandle.pack
        patch.setattr(MemoryHandle, "pack", lambda handle: damage(pack(handle)))

    return break_


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "damage",
    [
        lambda packet: packet[:-1],
        lambda packet: b"",
        lambda packet: packet[:40] + bytes([packet[40] ^ 1]) + packet[41:],
        lambda packet: b"another." + packet[8:],
    ],
    ids=["truncated", "empty", "altered", "another's"],
)
def test_damaged_packet_is_refused_by_all(device: str, damage: Callable[[bytes], bytes]) -> None:
    for culprit in EVERY_RANK:
        others = [rank for rank in EVERY_RANK if rank != culprit]
        said = rf"failed on ranks? {', '.join(map(str, others))}: memory of rank {culprit}: handle packet"
        fails = raises_everywhere(WORLD, HandleError, match=said)
        with nothing_leaks(), broken(culprit, device, damaged(damage)), fails:
            communicator(device)
        with communicator(device) as comm:
            kept = comm.zeros(1)
            fails = raises_everywhere(WORLD, HandleError, match=said)
            with nothing_leaks(), broken(culprit, device, damaged(damage)), fails:
                comm.empty(3)
            require_memory_works(comm)
            kept.close()


@pytest.mark.mpi(min_size=2)
def test_descriptor_of_less_memory_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        take_fd = host.HostSegment.take_fd

        def take_small_fd(segment: host.HostSegment) -> int:
            os.close(take_fd(segment))
            return host.memfd_create(8)

        patch.setattr(host.HostSegment, "take_fd", take_small_fd)

    with communicator("cpu") as comm:
        kept = comm.zeros(1)
        for culprit in EVERY_RANK:
            fails = raises_everywhere(WORLD, HandleError, match=f"memory of rank {culprit}: shared memory has 8 bytes")
            with nothing_leaks(), broken(culprit, "cpu", break_), fails:
                comm.empty(1000)
        require_memory_works(comm)
        kept.close()


@pytest.mark.mpi(min_size=2)
def test_descriptor_of_memory_that_can_shrink_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        patch.setattr(host, "_SEALS", fcntl.F_SEAL_GROW)

    with communicator("cpu") as comm:
        kept = comm.zeros(1)
        for culprit in EVERY_RANK:
            fails = raises_everywhere(WORLD, HandleError, match=f"memory of rank {culprit}: .* is not sealed")
            with nothing_leaks(), broken(culprit, "cpu", break_), fails:
                comm.empty(1000)
        require_memory_works(comm)
        kept.close()


# A rank that fails in the exchange sends no descriptors: the others wait half their time for those.
@pytest.mark.mpi(min_size=2)
def test_exchange_that_fails_on_one_rank_fails_on_all(comm_world: MPI.Intracomm) -> None:
    swap = of(FdExchange, "swap")
    with communicator("cpu", timeout_s=2) as comm:
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
            communicator("cpu", timeout_s=2)


@pytest.mark.mpi(min_size=2)
def test_writes_that_do_not_arrive_are_found_by_the_probe(device: str) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        view = backend.view
        patch.setattr(backend, "view", lambda self, *arguments: view(self, *arguments).copy())

    for culprit in EVERY_RANK:
        said = f"what rank {culprit} wrote into this rank's memory did not arrive"
        with nothing_leaks(), broken(culprit, device, break_), raises_everywhere(WORLD, HandleError, match=said):
            communicator(device)


def test_reads_that_bring_something_else_are_found_by_the_probe(device: str) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        patch.setattr(backend, "copy", lambda *_: None)

    for culprit in EVERY_RANK:
        said = f"failed on rank {culprit}: rank 0's memory reads 0 instead of "
        with nothing_leaks(), broken(culprit, device, break_), raises_everywhere(WORLD, HandleError, match=said):
            communicator(device)


# On two hosts


@pytest.fixture
def two_hosts(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    monkeypatch.setenv("MPICOMM_HOSTID", f"host {WORLD.rank % 2}")
    with communicator(device) as comm:
        yield comm


@pytest.mark.mpi(min_size=2)
@stages(ALLOCATE, ZERO, VIEW)
def test_failure_on_one_host_is_a_failure_on_both(
    no_leaks: None, two_hosts: mpicomm.Communicator, device: str, break_: Break
) -> None:
    for prepare in (lambda: None, lambda: two_hosts.zeros(1)):  # at first with the counters, then without
        prepare()
        for culprit in EVERY_RANK:
            with broken(culprit, device, break_), fails_everywhere(culprit):
                two_hosts.zeros(3)
        require_memory_works(two_hosts)


# A rank that does not come


CALLS: dict[str, Callable[[mpicomm.Communicator, mpicomm.SymmetricArray], object]] = {
    "zeros": lambda comm, array: comm.zeros(3),
    "shared_event": lambda comm, array: comm.shared_event(),
    "SymmetricArray 0: close": lambda comm, array: array.close(),
}


@contextmanager
def without(culprit: int) -> Iterator[MPI.Comm | None]:
    """The other ranks as a communicator; None on the culprit, which waits at the end for them."""
    others = WORLD.Split(MPI.UNDEFINED if WORLD.rank == culprit else 0)
    try:
        yield None if others == MPI.COMM_NULL else others
    finally:
        if others != MPI.COMM_NULL:
            others.Free()
        WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CALLS)
def test_rank_that_never_comes_is_named(comm: mpicomm.Communicator, device: str, name: str) -> None:
    require_memory_works(comm)
    for culprit in FIRST_AND_LAST if name != "zeros" else EVERY_RANK:
        with nothing_leaks():
            impatient = communicator(device, timeout_s=1)
            array = impatient.zeros(3)
            with without(culprit) as others:
                if others:
                    text = f"{name}.*: rank {culprit} did not arrive within 1 s"
                    with raises_everywhere(others, CollectiveTimeoutError, match=text) as excinfo:
                        CALLS[name](impatient, array)
                    assert excinfo.value.ranks == (culprit,)
                    for call in (impatient.check, lambda comm=impatient: comm.zeros(3), impatient.shared_event):
                        text = f"unusable since an earlier timeout .*rank {culprit} did not arrive"
                        with raises_everywhere(others, CollectiveTimeoutError, match=text):
                            call()
                    del excinfo, call
                    impatient.Free()
                    assert array.closed
                    impatient.Free()
            # Whoever comes late is told so.
            if WORLD.rank == culprit:
                with pytest.raises(MpicommError, match=name):
                    impatient.Free()
                while not array.closed:
                    with suppress(MpicommError):
                        impatient.Free()
                impatient.Free()
            require_memory_works(comm)
            del array, impatient


@pytest.mark.mpi(min_size=2)
def test_free_without_one_rank_frees_on_the_others(comm: mpicomm.Communicator, device: str) -> None:
    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=1)
        array = impatient.zeros(3)
        with without(culprit) as others:
            if others:
                with raises_everywhere(others, CollectiveTimeoutError, match=f"Free: rank {culprit} did not arrive"):
                    impatient.Free()
                assert array.closed
                impatient.Free()
        if WORLD.rank == culprit:
            with suppress(MpicommError):
                impatient.Free()
            assert array.closed
        require_memory_works(comm)


@pytest.mark.mpi(min_size=3)
def test_first_rank_that_comes_late_is_not_taken_for_the_one_that_never_comes(device: str) -> None:
    impatient = communicator(device, timeout_s=2)
    with without(WORLD.size - 1) as others:
        if others:
            if WORLD.rank == 0:
                time.sleep(1)
            text = f"rank {WORLD.size - 1} did not arrive within 2 s"
            with raises_everywhere(others, CollectiveTimeoutError, match=text):
                impatient.zeros(3)
            impatient.Free()
    if WORLD.rank == WORLD.size - 1:
        with suppress(MpicommError):
            impatient.Free()


@pytest.mark.mpi(min_size=2)
def test_rank_that_is_interrupted_is_missed_by_the_others(comm: mpicomm.Communicator, device: str) -> None:
    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=1)
        impatient.zeros(3)
        with without(culprit) as others, broken(culprit, device, ALLOCATE["allocate"], KeyboardInterrupt):
            if others:
                with raises_everywhere(others, CollectiveTimeoutError, match=f"rank {culprit} did not arrive"):
                    impatient.zeros(4)
                impatient.Free()
            else:
                with pytest.raises(KeyboardInterrupt):
                    impatient.zeros(4)
        if WORLD.rank == culprit:
            with suppress(MpicommError):
                impatient.Free()
        require_memory_works(comm)


@pytest.mark.mpi(min_size=2)
def test_rank_that_is_interrupted_in_an_exchange_takes_part_in_no_other(device: str) -> None:
    for culprit in FIRST_AND_LAST:
        impatient = communicator(device, timeout_s=1)
        with without(culprit) as others:
            if others:
                # They may just have heard all of the exchange in which it was interrupted.
                with raises_everywhere(others, CollectiveTimeoutError, match=f"rank {culprit} did not arrive"):
                    impatient.zeros(3)
                impatient.Free()
            else:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(bootstrap, "wait_until", raising(KeyboardInterrupt))
                    with pytest.raises(KeyboardInterrupt):
                        impatient.zeros(3)
                text = f"unusable since an earlier error .rank {culprit} left in the middle of .*: KeyboardInterrupt"
                for call in (impatient.check, lambda comm=impatient: comm.zeros(3), impatient.shared_event):
                    with pytest.raises(PeerError, match=text):
                        call()
                impatient.Free()


@pytest.mark.mpi(min_size=2)
def test_rank_that_is_gone_before_it_sends_a_descriptor_is_missed_in_time(comm_world: MPI.Intracomm) -> None:
    timeout_s = 3.0
    for culprit in FIRST_AND_LAST:
        impatient = communicator("cpu", timeout_s=timeout_s)
        impatient.zeros(3)
        swap_never = of(FdExchange, "swap")
        with without(culprit) as others, broken(culprit, "cpu", swap_never, KeyboardInterrupt):
            start = time.monotonic()
            with pytest.raises(CollectiveTimeoutError if others else KeyboardInterrupt):
                impatient.zeros(4)
            assert time.monotonic() - start < timeout_s + 1
            if others:
                impatient.Free()
        if WORLD.rank == culprit:
            with suppress(MpicommError):
                impatient.Free()


@pytest.mark.mpi(min_size=2)
def test_rank_that_never_comes_to_create_a_communicator_is_missed(comm_world: MPI.Intracomm) -> None:
    for culprit in FIRST_AND_LAST:
        parent = comm_world.Dup()  # of no use afterwards: one of its ranks has begun a collective call
        with without(culprit) as others:
            if others:
                with raises_everywhere(others, CollectiveTimeoutError, match="Communicator: .* within 1 s"):
                    mpicomm.Communicator(parent, device="cpu", timeout_s=1)


# A rank that does something else


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
            # Nothing came of it, on any rank.
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
