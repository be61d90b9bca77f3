"""One rank hands over wrong descriptors or other memory in a set-up."""

from __future__ import annotations

import fcntl
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.devices import host_memory
from mpicomm.devices.handle import Descriptor
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.setup_failures import EVERY_RANK, Break, fails_everywhere
from tests.helpers.rigs.communicators import communicator, require_memory_works


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
