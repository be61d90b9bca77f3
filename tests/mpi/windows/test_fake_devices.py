"""Windows of GPUs, on devices that are made of threads: the steps, streams and scratch memory of each call."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, KernelCompileError
from mpicomm.devices.handle import KEY_NBYTES, Descriptor, MemoryHandle
from mpicomm.devices.host_memory import HostSegment
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.message_rigs import COUNT, placed, window_rig


def spread(count: int, datatype: MPI.Datatype = MPI.INT64_T) -> MPI.Datatype:
    return datatype.Create_vector(count, 1, 2).Commit()


def test_synchronisations_follow_accesses_on_other_streams_and_precede_them() -> None:
    with window_rig() as rig:
        win, late, seen = rig.win, rig.of([7]), rig.of([0])
        win.Fence(stream=2)
        rig.device.enqueue(1, lambda: time.sleep(0.1))
        win.Put(late, rig.right, stream=1)
        win.Fence(stream=2)
        win.Get(seen, rig.rank, stream=3)
        rig.device.synchronize(3)
        assert seen.memory.tolist() == [7]
        for number, stream in ((8, 2), (9, 7)):  # 2 is a default stream, which lasts
            win.Fence(stream=stream)
            rig.device.enqueue(stream, lambda: time.sleep(0.1))
            win.Put(rig.of([number]), rig.right, stream=stream)
            win.Fence(stream=4)
            win.Get(seen, rig.rank, stream=5)
            rig.device.synchronize(5)
            assert seen.memory.tolist() == [number]


def test_test_sees_a_complete_whose_device_is_busy() -> None:
    with window_rig() as rig:
        win, everyone = rig.win, rig.win.Get_group()
        right, left = everyone.Incl([rig.right]), everyone.Incl([rig.left])
        for turn in range(3):
            go_on = threading.Event()
            win.Post(left)
            MPI.Intracomm.Barrier(rig.comm)
            assert not win.Test()
            MPI.Intracomm.Barrier(rig.comm)
            win.Start(right)
            rig.device.enqueue(0, functools.partial(go_on.wait, 10.0))
            win.Put(rig.of([turn]), rig.right, turn)
            win.Complete()
            MPI.Intracomm.Barrier(rig.comm)
            assert win.Test(stream=1)
            go_on.set()
            assert rig.mine()[turn] == turn
        for group in (everyone, right, left):
            group.Free()


def test_misaligned_origins_are_accumulated() -> None:
    with window_rig() as rig:
        win, seen = rig.win, rig.of(np.zeros(4))
        memory, holder = placed(rig, np.arange(4) + 10)
        given = [memory, MPI.INT64_T]
        win.Fence()
        win.Accumulate(given, 0, 5)
        win.Fence()
        win.Get_accumulate(None, seen, 0, 5, MPI.NO_OP)
        win.Fence()
        assert seen.get().tolist() == [rig.size * each - 1 for each in range(10, 14)]
        win.Fence()
        win.Get_accumulate(given, seen, rig.right, 5, MPI.REPLACE)
        win.Fence()
        assert rig.mine()[4:10] == [-1, 10, 11, 12, 13, -1] and holder.memory.size


def test_graphs_take_device_arrays_and_refuse_copies_to_the_host() -> None:
    with window_rig() as rig:
        rig.win.Fence()
        x = rig.of([4])
        for _ in range(2):  # the second calls are known
            rig.win.Put(x, rig.rank, 1, stream=5)
            rig.win.Accumulate(x, rig.rank, 2, stream=5)
            rig.device.capturing = True
        rig.win.Fence(stream=5)
        with pytest.raises(InvalidUsageError, match="origin is in host memory"):
            rig.win.Get([np.zeros(4, np.int64), 1, spread(2)], rig.rank)
        rig.device.capturing = False
        assert rig.mine()[1:3] == [4, 7]


def test_elements_that_kernels_cannot_update_are_refused() -> None:
    with window_rig(np.float32) as rig:
        win = rig.win
        win.Fence()
        with pytest.raises(InvalidUsageError, match="do not lie at multiples of 8 bytes"):
            win.Accumulate(rig.of([1.0], np.float64), 0, (1, 1, MPI.DOUBLE))
        pair = MPI.FLOAT.Create_hvector(2, 1, 6).Commit()
        with pytest.raises(InvalidUsageError, match="do not lie at multiples of 4 bytes"):
            win.Accumulate(rig.of([1.0, 2.0]), 0, (0, 1, pair))
        pair.Free()
        with pytest.raises(InvalidUsageError, match="a GPU does not update elements of"):
            win.Accumulate(np.ones(1, np.longdouble), 0)
        rig.device.info = type(rig.device.info)(compute_capability=(8, 0))
        with pytest.raises(InvalidUsageError, match=r"only GPUs of compute capability 9\.0"):
            win.Accumulate(rig.of([1.0], complex), 0, (0, 1, MPI.C_DOUBLE_COMPLEX))
        win.Fence()
        assert rig.mine() == [-1] * COUNT


def test_links_without_atomics_carry_puts_and_refuse_accumulates_and_locks() -> None:
    with window_rig(atomics=lambda rank: False) as rig:
        win = rig.win
        win.Fence()
        win.Put(rig.of([3]), rig.right)
        acts: list[Callable[[], object]] = [
            lambda: win.Accumulate(rig.of([1]), rig.right),
            lambda: win.Fetch_and_op(rig.of([1]), rig.of([1]), rig.right),
            lambda: win.Compare_and_swap(rig.of([1]), rig.of([1]), rig.of([1]), rig.right),
        ]
        for act in acts:
            with pytest.raises(InvalidUsageError, match=rf"memory of rank {rig.right} \(PCIe\) carries no atomics"):
                act()
        win.Fence(MPI.MODE_NOSUCCEED)
        with pytest.raises(InvalidUsageError, match="carries no atomics"):
            win.Lock(rig.right)
        with pytest.raises(InvalidUsageError, match="carries no atomics"):
            win.Lock_all()
        assert rig.mine()[0] == 3


@pytest.mark.mpi(min_size=2)
def test_kernels_that_do_not_load_on_one_rank_make_no_window() -> None:
    with window_rig() as rig:
        load = rig.device.load

        def fail(variant: Any) -> object:
            raise KernelCompileError("NVRTC cannot compile it")

        rig.device.load = fail if rig.rank == 1 else load  # type: ignore[method-assign]
        with pytest.raises(KernelCompileError, match="rank 1: NVRTC cannot compile it"):
            mpicomm.Win.Allocate(8, comm=rig.comm)
        rig.device.load = load  # type: ignore[method-assign]
        mpicomm.Win.Allocate(8, comm=rig.comm).Free()


@pytest.mark.mpi(min_size=2)
def test_memory_of_two_kinds_is_refused_on_all_ranks() -> None:
    with window_rig() as rig:
        memory: Any = rig.of([1, 2]) if rig.rank == 0 else np.zeros(2, np.int64)
        with pytest.raises(InvalidUsageError, match="memory is device memory on rank 0 and host memory on rank"):
            mpicomm.Win.Create(memory, 8, MPI.INFO_NULL, rig.comm)
        win = mpicomm.Win.Create(np.zeros(2) if rig.rank else None, 8, MPI.INFO_NULL, rig.comm)
        assert type(win) is mpicomm.Win  # host memory, and no memory, make a window of MPI
        win.Lock(1)
        for call in (win.Put, win.Get, win.Rput, win.Rget, win.Accumulate, win.Raccumulate):
            with pytest.raises(InvalidUsageError, match="origin lies in device memory, and the window in host memory"):
                call(rig.of([1]), 1)
        for fetch in (win.Get_accumulate, win.Rget_accumulate, win.Fetch_and_op):
            with pytest.raises(InvalidUsageError, match="result lies in device memory"):
                fetch(np.ones(1, np.int64), rig.of([1]), 1)
        with pytest.raises(InvalidUsageError, match="compare lies in device memory"):
            win.Compare_and_swap(np.ones(1), rig.of([1]), np.ones(1), 1)
        win.Unlock(1)
        win.Free()


@pytest.mark.mpi(min_size=2)
def test_rank_that_does_not_come_fails_the_device() -> None:
    with window_rig(timeout_s=stretched(0.3)) as rig:
        if rig.rank == 1:
            rig.win.Fence()
            rig.device.synchronize()
            with pytest.raises(CollectiveTimeoutError, match="operation 5: number 1 from rank"):
                rig.win.Fence()
        rig.device.missed = rig.device.missed or ("the test is over", 0)
        MPI.Intracomm.Barrier(rig.comm)


def test_memory_that_only_a_message_hands_over_cannot_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual memory of a GPU has descriptors, which open only in a process to which a message has carried them."""
    with window_rig() as rig:
        win = mpicomm.Win.Create_dynamic(comm=rig.comm)
        descriptors, attached = [Descriptor.of(os.memfd_create, "virtual")], rig.of([1, 2])
        segment = HostSegment(attached.memory.view(np.uint8))
        handle = MemoryHandle("fd", bytes(16), bytes(KEY_NBYTES), 16, 0, 16)
        monkeypatch.setattr(rig.device, "adopt", lambda array: segment)
        monkeypatch.setattr(rig.device, "export", lambda segment: ((handle, descriptors[0]),))
        with pytest.raises(InvalidUsageError, match=r"lies in virtual memory or .* or pass the array to Win\.Create"):
            win.Attach(attached)
        assert segment.content is None
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[0])
        win.Lock(rig.rank)
        with pytest.raises(MPI.Exception, match=f"rank {rig.rank} has attached no memory"):
            win.Put(rig.of([3]), rig.rank, attached.memory.ctypes.data)
        win.Unlock(rig.rank)
        rig.barrier()
        win.Free()


def test_known_updates_leave_misaligned_elements_to_other_calls() -> None:
    with window_rig(np.float32) as rig:
        win = rig.win
        win.Lock(rig.rank)
        for _ in range(2):
            win.Accumulate(rig.of([1.0]), rig.rank, 3)
        memory, holder = placed(rig, np.ones(1, np.float32))
        win.Accumulate([memory, MPI.FLOAT], rig.rank, 3)
        wide = rig.of([1.0, 1.0], np.float64)
        win.Accumulate(wide, rig.rank, 10)
        with pytest.raises(InvalidUsageError, match="do not lie at multiples of 8 bytes"):
            win.Accumulate(wide, rig.rank, 11)
        win.Unlock(rig.rank)
        assert rig.mine()[3] == 2.0 and holder.memory.size


def test_updates_that_repeat_are_made_ready_and_other_updates_come_between() -> None:
    with window_rig() as rig:
        win, one, before = rig.win, rig.of([1]), rig.of([0])
        win.Lock(rig.rank)
        for turn in range(30):
            win.Fetch_and_op(one, before, rig.rank, 3)
            assert before.get().tolist() == [turn - 1]
        assert rig.device.graphs == 1
        for turn in range(4):
            win.Fetch_and_op(one, before, rig.rank, 4)
            win.Fetch_and_op(one, before, rig.rank, 3)
            assert before.get().tolist() == [29 + turn]
        rig.device.capturing = True
        win.Fetch_and_op(one, before, rig.rank, 3)
        rig.device.capturing = False
        win.Unlock(rig.rank)
        assert rig.mine()[3:5] == [33 + 1, 3]
        assert rig.device.graphs == 1
