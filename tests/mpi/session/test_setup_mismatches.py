"""Ranks call different things in a set-up, or one hands over wrong memory: all get an error, and nothing changes."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import PeerError
from mpicomm.devices import host_memory
from mpicomm.devices.handle import Descriptor
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.faults.setup_failures import EVERY_RANK, FIRST_AND_LAST, WORLD, Break, fails_everywhere
from tests.helpers.rigs.communicators import communicator, require_memory_works, to_host

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
def test_descriptor_of_less_memory_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        take_fd = host_memory.HostSegment.take_fd

        def take_small_fd(segment: host_memory.HostSegment) -> Descriptor:
            take_fd(segment).close()
            return host_memory.memfd_create(8)

        patch.setattr(host_memory.HostSegment, "take_fd", take_small_fd)

    require_descriptor_is_refused(break_, "shared memory has 8 bytes")


@pytest.mark.mpi(min_size=2)
def test_descriptor_of_memory_that_can_shrink_is_refused_by_all(comm_world: MPI.Intracomm) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        patch.setattr(host_memory, "_SEALS", fcntl.F_SEAL_GROW)

    require_descriptor_is_refused(break_, ".* is not sealed")


def require_descriptor_is_refused(break_: Break, said: str) -> None:
    with communicator("cpu") as comm:
        kept = comm.zeros(1)
        for culprit in EVERY_RANK:
            with nothing_leaks(), fails_everywhere(culprit, "cpu", break_, match=f"memory of rank {culprit}: {said}"):
                comm.empty(1000)
        require_memory_works(comm)
        kept.close()


@pytest.mark.mpi(min_size=2)
def test_writes_that_do_not_arrive_are_found_by_the_probe(device: str) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        view = backend.view
        patch.setattr(backend, "view", lambda self, *arguments: view(self, *arguments).copy())

    for culprit in EVERY_RANK:
        said = f"a word of rank {culprit} did not arrive in this rank's memory"
        with nothing_leaks(), fails_everywhere(culprit, device, break_, match=said):
            communicator(device)


def test_reads_that_bring_something_else_are_found_by_the_probe(device: str) -> None:
    def break_(patch: pytest.MonkeyPatch, backend: Any, error: type[BaseException]) -> None:
        patch.setattr(backend, "copy", lambda *_: None)

    for culprit in EVERY_RANK:
        said = f"failed on rank {culprit}: rank 0's memory reads 0 instead of "
        with nothing_leaks(), fails_everywhere(culprit, device, break_, match=said):
            communicator(device)
