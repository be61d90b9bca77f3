"""Attributes of a Communicator: their copy and delete functions run as often as MPI runs them."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import communicator
from tests.helpers.rigs.message_rigs import take_for_gpu


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


def test_a_communicator_says_which_memory_its_calls_take(comm_world: MPI.Intracomm) -> None:
    """MPI 4.1, section 11.4.3; programs ask so whether MPI is CUDA-aware."""
    key = "mpi_memory_alloc_kinds"
    with communicator("cpu", comm_world) as comm, comm.Dup() as child:
        kinds = child.Get_info().Get(key)
        assert kinds is not None and {*kinds.split(",")} >= {"system", "mpi"} and "cuda" not in kinds
        take_for_gpu(child)
        kinds = child.Get_info().Get(key)
        assert kinds is not None and {*kinds.split(",")} >= {"system", "mpi", "cuda:device", "cuda:host"}
        asked = MPI.Info.Create({key: "system,cuda:device"})
        with child.Dup_with_info(asked) as again:
            assert again.Get_info().Get(key) == kinds
        asked.Free()
