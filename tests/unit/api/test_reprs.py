"""What a user sees who prints an object of the package."""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import mpicomm


def test_objects_show_their_place_and_state() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        assert repr(comm) == "<mpicomm.Communicator rank 0 of 1 device='cpu' handle='memfd'>"
        event = comm.shared_event()
        assert repr(event) == "<SharedEvent device='cpu'>"
        event.close()
        assert repr(event) == "<SharedEvent closed>"
        win = mpicomm.Win.Allocate(8, 8, comm=comm)
        assert repr(win) == "<mpicomm.Win place='mpi'>"
        win.Free()
        assert repr(win) == "<mpicomm.Win freed>"


def test_requests_show_whether_they_are_active() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        x, y = np.ones(8), np.empty(8)
        by_mpi, mapped = comm.Iallreduce(x, y), comm.Iallreduce(x, y, algorithm="one_shot")
        assert repr(by_mpi) == "<mpicomm.Request active>"
        assert repr(mapped) == "<mpicomm.DeferredRequest active>"
        MPI.Request.Waitall([by_mpi, mapped])
        assert repr(by_mpi) == "<mpicomm.Request inactive>"
        assert repr(mapped) == "<mpicomm.DeferredRequest inactive>"
