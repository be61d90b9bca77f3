"""Attributes of a Communicator: their copy and delete functions run as often as MPI runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm


def test_functions_of_attributes_run_once_for_each_communicator(comm_world: MPI.Intracomm) -> None:
    copied: list[Any] = []
    deleted: list[Any] = []

    def copy(comm: MPI.Comm, keyval: int, value: Any) -> Any:
        copied.append(value)
        return value

    def delete(comm: MPI.Comm, keyval: int, value: Any) -> None:
        deleted.append(value)

    keyval = MPI.Comm.Create_keyval(copy, delete)
    plain = comm_world.Dup()
    plain.Set_attr(keyval, "value")
    with mpicomm.Communicator(plain, device="cpu") as comm:
        assert comm.Get_attr(keyval) == "value"
        assert copied == ["value"] and deleted == []
        with comm.Dup() as again:
            again.Allreduce(MPI.IN_PLACE, np.ones(300_000, np.int16))  # sets the communicator up
            assert again.Get_attr(keyval) == "value"
            assert copied == ["value"] * 2 and deleted == []
        assert deleted == ["value"]
    assert deleted == ["value"] * 2
    plain.Free()
    assert deleted == ["value"] * 3 and copied == ["value"] * 2
    MPI.Comm.Free_keyval(keyval)
