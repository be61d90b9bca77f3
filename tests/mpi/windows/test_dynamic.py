"""Dynamic windows: memory that ranks attach without each other, accessed by its address on its rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError, InvalidUsageError
from tests.helpers.rigs.communicators import communicator, settle, to_host


def test_attached_memory_is_accessed_by_its_address(comm: mpicomm.Communicator, xp: Any) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win = mpicomm.Win.Create_dynamic(comm=comm, place="device")
    assert win.flavor == MPI.WIN_FLAVOR_DYNAMIC
    first, second = xp.full(6, -1), xp.full(3, -1)
    for turn, array in enumerate((first, second, first)):
        win.Attach(array)
        settle(comm)
        there = comm.allgather(MPI.Get_address(array))[right]
        win.Lock(right)
        win.Put(xp.array([turn, comm.rank]), right, there + 8)
        win.Accumulate(xp.array([5]), right, there)
        win.Unlock(right)
        settle(comm)
        assert to_host(array)[:3].tolist() == [4 if turn < 2 else 9, turn, left]
        seen = xp.zeros(3, np.int64)
        win.Lock_all()
        win.Get(seen, right, (there, 3, MPI.INT64_T))
        win.Unlock_all()
        assert to_host(seen).tolist() == [4 if turn < 2 else 9, turn, comm.rank]
        settle(comm)
        win.Detach(array)
        comm.Barrier()
        win.Lock(right)
        with pytest.raises(MPI.Exception, match=f"rank {right} has attached no memory that holds") as caught:
            win.Put(xp.array([7]), right, there)
        assert caught.value.Get_error_class() == MPI.ERR_RMA_RANGE
        win.Unlock(right)
        comm.Barrier()
    win.Free()


def test_wrong_memory_is_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    win = mpicomm.Win.Create_dynamic(comm=comm, place="device")
    array = xp.full(6, -1)
    win.Attach(array)
    with pytest.raises(InvalidUsageError, match=r"Win\.Attach: memory overlaps 48 bytes"):
        win.Attach(array[2:4])
    with pytest.raises(InvalidUsageError, match=r"Win\.Detach: no memory is attached at address"):
        win.Detach(array[1:])
    win.Lock(comm.rank)
    end = MPI.Get_address(array) + 40
    with pytest.raises(MPI.Exception, match="has attached no memory that holds"):
        win.Put(xp.ones(2, np.int64), comm.rank, end)
    win.Put(xp.ones(1, np.int64), comm.rank, end)
    win.Unlock(comm.rank)
    comm.check()
    assert to_host(array).tolist() == [-1] * 5 + [1]
    with pytest.raises(MPI.Exception, match=r"Win\.Shared_query: ranks attach the memory"):
        win.Shared_query(0)
    comm.Barrier()
    win.Free()
    with pytest.raises((InvalidUsageError, HandleError)):
        win.Attach(np.zeros(3))


def test_only_dynamic_windows_take_more_memory(comm: mpicomm.Communicator, xp: Any) -> None:
    win = mpicomm.Win.Allocate(8, comm=comm, place="device")
    for call in (win.Attach, win.Detach):
        with pytest.raises(MPI.Exception, match="make it by Create_dynamic"):
            call(xp.ones(1))
    win.Free()


def test_dynamic_windows_of_the_host_are_mpis(comm: mpicomm.Communicator) -> None:
    win = mpicomm.Win.Create_dynamic(comm=comm, place="mpi")
    memory = np.zeros(4)
    win.Attach(memory)
    win.Lock(comm.rank)
    win.Put(np.full(1, 3.0), comm.rank, MPI.Get_address(memory) + 8)
    win.Unlock(comm.rank)
    assert memory.tolist() == [0, 3, 0, 0]
    win.Detach(memory)
    win.Free()


def test_virtual_memory_of_a_gpu_is_refused(device: str) -> None:
    if device == "cpu":
        pytest.skip("virtual memory is memory of GPUs")
    with communicator(device, handle="fd") as comm:
        win = mpicomm.Win.Create_dynamic(comm=comm)
        with comm.empty(8, np.int64) as array:  # its memory is virtual, as the memory of expandable segments
            with pytest.raises(InvalidUsageError, match=r"lies in virtual memory or .*, which ranks can open only"):
                win.Attach(array.local)
            with pytest.raises(InvalidUsageError, match="no memory is attached"):
                win.Detach(array.local)
        win.Free()
