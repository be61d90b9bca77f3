"""Calls on windows of GPUs whose form an earlier call had: other addresses and counts, and the same checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from tests.helpers.rigs.window_rigs import COUNT, WindowRig, placed, window_rig


def test_known_calls_take_other_addresses_counts_and_targets() -> None:
    with window_rig() as rig:
        win = rig.win
        win.Fence()
        for turn, values in enumerate(([1], [2, 3], [4, 5, 6], [7])):
            win.Put(rig.of(values), rig.right, 10 * turn)
        win.Put(rig.of([9]), rig.right)
        win.Fence()
        mine = rig.mine()
        assert [mine[start : start + 3] for start in (0, 10, 20, 30)] == [
            [9, -1, -1],
            [2, 3, -1],
            [4, 5, 6],
            [7, -1, -1],
        ]
        seen = [rig.of([0] * count) for count in (1, 2, 3)]
        for turn, each in enumerate(seen):
            win.Get(each, rig.right, 10 * turn)
        win.Fence()
        assert [each.get().tolist() for each in seen] == [[9], [2, 3], [4, 5, 6]]


def test_known_calls_take_mpis_forms_of_buffers_and_targets() -> None:
    with window_rig() as rig:
        win, seen = rig.win, rig.of([0, 0])
        win.Lock(rig.rank)
        for turn in range(3):
            win.Put([rig.of([turn, 7]), MPI.INT64_T], rig.rank, (2, 2, MPI.INT64_T))
            win.Put([rig.of([turn, 8, 9]), 2, MPI.INT64_T], rig.rank, [5, 2])
            win.Accumulate([rig.of([1, 1]), MPI.INT64_T], rig.rank, [2, 2, MPI.INT64_T])
            win.Get([seen, MPI.INT64_T], rig.rank, (2, 2, MPI.INT64_T))
            assert seen.get().tolist() == [turn + 1, 8]
            assert rig.mine()[4:8] == [-1, turn, 8, -1]
        wide = rig.of([1, 2])
        for _ in range(2):  # other elements of as many bytes
            win.Put(wide, rig.rank, (10, 4, MPI.INT32_T))
            with pytest.raises(MPI.Exception, match="pass as many elements"):
                win.Put(wide, rig.rank, (10, 2, MPI.INT32_T))
            with pytest.raises(MPI.Exception, match="target has 24 bytes, and origin has 16"):
                win.Put(wide, rig.rank, (10, 3))
            with pytest.raises(MPI.Exception, match="target has 24 bytes, and origin has 16"):
                win.Put([wide, MPI.INT64_T], rig.rank, (10, 3, MPI.INT64_T))
        win.Put(rig.of([5]), rig.rank, (COUNT - 1, 1))
        with pytest.raises(MPI.Exception, match="reaches from byte"):
            win.Put(rig.of([5]), rig.rank, (COUNT, 1))
        win.Unlock(rig.rank)
        assert rig.mine()[9:13] == [-1, 1, 2, -1]


def test_known_updates_keep_operations_results_and_targets_apart() -> None:
    with window_rig() as rig:
        win, before = rig.win, [rig.of([0] * count) for count in (1, 2, 1)]
        win.Lock(rig.rank)
        for _ in range(2):
            win.Accumulate(rig.of([5, 6]), rig.rank, 4)
            win.Accumulate(rig.of([3]), rig.rank, 4, MPI.PROD)
            win.Get_accumulate(rig.of([1]), before[0], rig.rank, 5)
            win.Get_accumulate(rig.of([2, 2]), before[1], rig.rank, 5, MPI.REPLACE)
            win.Fetch_and_op(rig.of([8]), before[2], rig.rank, 6)
        win.Unlock(rig.rank)
        assert rig.mine()[3:8] == [-1, ((-1 + 5) * 3 + 5) * 3, 2, 10, -1]
        assert [each.get().tolist() for each in before] == [[8], [9, 10], [2]]
        sums = sum(variant.entry == "mpicomm_accumulate" for variant in rig.device.launchers)
        assert sums == 3  # a launch for each operation, however many calls


def known_calls(rig: WindowRig) -> list[tuple[Callable[[Any, Any, Any], object], int]]:
    """Return known calls of an origin, a result and a displacement, and the lengths of their buffers."""
    win, rank = rig.win, rig.rank
    calls: list[tuple[Callable[[Any, Any, Any], object], int]] = [
        (lambda x, y, disp: win.Put(x, rank, disp), 2),
        (lambda x, y, disp: win.Get(x, rank, disp), 2),
        (lambda x, y, disp: win.Accumulate(x, rank, disp), 2),
        (lambda x, y, disp: win.Get_accumulate(x, y, rank, disp), 2),
        (lambda x, y, disp: win.Fetch_and_op(x, y, rank, disp), 1),
    ]
    for call, count in calls:
        call(rig.of([0] * count), rig.of([0] * count), 0)
    return calls


def test_known_calls_raise_the_errors_of_other_calls() -> None:
    with window_rig() as rig:
        win = rig.win
        win.Lock(rig.rank)
        calls = known_calls(rig)
        kept = rig.mine()
        for call, count in calls:
            x, y = rig.of([7] * count), rig.of([7] * count)
            for disp, error in ((COUNT, MPI.ERR_RMA_RANGE), (-1, MPI.ERR_DISP)):
                with pytest.raises(MPI.Exception) as caught:
                    call(x, y, disp)
                assert caught.value.Get_error_class() == error
            with pytest.raises(TypeError, match="is no integer"):
                call(x, y, 1.5)
            with pytest.raises(MPI.Exception, match=r"reaches from byte|pass one element"):
                call(rig.of([7] * (COUNT + 1)), rig.of([7] * (COUNT + 1)), 0)
        for call, count in calls[3:]:
            with pytest.raises(MPI.Exception, match=r"pass as many|pass one element"):
                call(rig.of([7] * count), rig.of([7] * (count + 1)), 0)
        with pytest.raises(MPI.Exception, match="has 2 elements: pass one element"):
            win.Fetch_and_op(rig.of([7, 7]), rig.of([7, 7]), rig.rank)
        wrong: Any = (0, 1)
        with pytest.raises(TypeError, match=r"displacement \(0, 1\) is no integer"):
            win.Fetch_and_op(rig.of([7]), rig.of([7]), rig.rank, wrong)
        win.Unlock(rig.rank)
        for call, count in calls:
            with pytest.raises(MPI.Exception, match="is in no epoch"):
                call(rig.of([7] * count), rig.of([7] * count), 0)
        assert rig.mine() == kept
        rig.barrier()
        win.Free()
        for call, count in calls:
            with pytest.raises(MPI.Exception, match="the window was freed"):
                call(rig.of([7] * count), rig.of([7] * count), 0)
        rig.win = type(win).Allocate(8, comm=rig.comm)


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
        assert len(rig.device.fixed) == 1
        for turn in range(4):
            win.Fetch_and_op(one, before, rig.rank, 4)
            win.Fetch_and_op(one, before, rig.rank, 3)
            assert before.get().tolist() == [29 + turn]
        rig.device.capturing = True
        win.Fetch_and_op(one, before, rig.rank, 3)
        rig.device.capturing = False
        win.Unlock(rig.rank)
        assert rig.mine()[3:5] == [33 + 1, 3]
        assert len(rig.device.fixed) == 1


def test_known_calls_are_captured() -> None:
    with window_rig() as rig:
        rig.win.Fence()
        x = rig.of([4])
        rig.win.Put(x, rig.rank, 1)
        rig.win.Accumulate(x, rig.rank, 2)
        rig.device.capturing = True
        rig.win.Put(x, rig.rank, 3, stream=5)
        rig.win.Accumulate(x, rig.rank, 4, stream=5)
        rig.device.capturing = False
        rig.win.Fence(stream=5)
        assert rig.mine()[1:5] == [4, 3, 4, 3]
