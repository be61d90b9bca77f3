"""Communicators free MPI's communicators, because an MPI has room for only some thousands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError
from mpicomm.cluster import placement
from tests.helpers.faults.setup_failures import raising
from tests.helpers.rigs.communicators import require_memory_works

MORE_THAN_THERE_IS_ROOM_FOR = 3000
ROOM = 20
ROUNDS = 10 * ROOM


@pytest.fixture
def little_room() -> Iterator[None]:
    """Take nearly all room of MPI's communicators, because mpicomm's take long to fill it."""
    held: list[MPI.Intracomm] = []
    with suppress(MPI.Exception):
        held.extend(MPI.COMM_SELF.Dup() for _ in range(MORE_THAN_THERE_IS_ROOM_FOR))
    for _ in range(ROOM):
        held.pop().Free()
    yield
    for each in held:
        each.Free()


@pytest.mark.usefixtures("little_room")
def test_communicators_of_mpi_are_given_back() -> None:
    for _ in range(ROUNDS):
        with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm, comm.Split() as child:
            child.zeros(1)


@pytest.mark.usefixtures("little_room")
def test_children_that_fail_free_their_communicators() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm, comm.Dup() as child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement.Placement, "create_backend", raising(OSError))
            for _ in range(ROUNDS):
                with pytest.raises(HandleError, match="injected"):
                    child.zeros(3)
        require_memory_works(child)
