"""Accumulates of pairs, by operations of users and from all ranks at once; test_synchronisation.py has the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.fakes.window_devices import FakeCupy
from tests.helpers.rigs.communicators import to_host
from tests.mpi.windows.conftest import MakeWindow


def test_nothing_goes_to_proc_null(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(2, fill=3)
    win.Fence()
    win.Put(xp.ones(100), MPI.PROC_NULL, 77)
    win.Get(xp.ones(100), MPI.PROC_NULL)
    win.Accumulate(xp.ones(100), MPI.PROC_NULL)
    win.Fence(MPI.MODE_NOSUCCEED)
    win.Lock_all()
    requests = [win.Rput(xp.ones(1), MPI.PROC_NULL), win.Raccumulate(xp.ones(1), MPI.PROC_NULL)]
    assert MPI.Request.Waitall(requests)
    while not win.Rput(xp.zeros(0, np.int64), comm.rank).Test():
        pass
    win.Unlock_all()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [3, 3]


PAIRS = {"FLOAT_INT": "f4", "DOUBLE_INT": "f8", "LONG_INT": "i8", "TWOINT": "i4", "SHORT_INT": "i2"}


def pair(name: str) -> tuple[MPI.Datatype, np.dtype[Any]]:
    return getattr(MPI, name), np.dtype([("value", PAIRS[name]), ("index", "i4")], align=True)


@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
def test_pairs_of_a_value_and_an_index_are_compared(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, op: str
) -> None:
    for datatype, dtype in map(pair, PAIRS):
        extent = dtype.itemsize
        parts = np.zeros((comm.size, 6), dtype)
        parts["value"] = np.random.default_rng(1).integers(0, 4, parts.shape)
        parts["index"] = 10 * np.arange(comm.size)[:, None] + np.arange(6)
        of_all = [xp.asarray(part.view(np.uint8)) for part in parts]
        win, before = window(6 * extent, np.uint8, disp_unit=extent), xp.zeros(6 * extent, np.uint8)
        win.Fence()
        win.Accumulate([of_all[0], 6, datatype], 0, (0, 6, datatype), MPI.REPLACE)
        win.Fence()
        win.Get_accumulate([of_all[comm.rank], 6, datatype], [before, 6, datatype], 0, 0, getattr(MPI, op))
        win.Fence()
        win.Fetch_and_op(None, [before, 1, datatype], 0, 5, MPI.NO_OP)
        win.Get([before[extent:], 5, datatype], 0, 0)
        win.Fence()
        expected = []
        for column in parts.T:
            best = column["value"].min() if op == "MINLOC" else column["value"].max()
            expected.append((best, column["index"][column["value"] == best].min()))
        found = to_host(before).view(dtype)
        assert [(each["value"], each["index"]) for each in found] == [expected[5], *expected[:5]], dtype


@pytest.mark.parametrize("op", ["REPLACE", "MAXLOC"])
def test_derived_datatypes_of_pairs_are_updated(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, op: str
) -> None:
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for datatype, dtype in map(pair, PAIRS):
        extent = dtype.itemsize
        row, column = datatype.Create_contiguous(2).Commit(), datatype.Create_vector(2, 1, 2).Commit()
        mine = np.zeros(4, dtype)
        mine["value"], mine["index"] = [1, 2, 3, 4], comm.rank
        win, origin = window(4 * extent, np.uint8, disp_unit=extent), xp.asarray(mine.view(np.uint8))
        for made, first, places, sent in ((row, 1, [1, 2], [1, 2]), (column, 0, [0, 2], [1, 3])):
            win.Fence()
            win.Accumulate([origin, 1, made], right, (first, 1, made), getattr(MPI, op))
            win.Fence()
            comm.check()
            found = to_host(win.tomemory()).view(dtype)[places]
            assert [(each["value"], each["index"]) for each in found] == [(each, left) for each in sent], dtype
            made.Free()


def test_an_operation_of_the_user_accumulates(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    if type(xp) is FakeCupy:
        pytest.skip("doubles of GPUs have no operations of users")
    win = window(3, np.float64)
    win.Fence()
    win.Accumulate(xp.array([1.0, 2.0, -7.0]) * (1 + comm.rank), 0, op=mpicomm.Op("max(a, abs(b))"))
    win.Fence()
    if comm.rank == 0:
        assert to_host(win.tomemory().view(np.float64)).tolist() == [comm.size, 2 * comm.size, 7 * comm.size]


@pytest.mark.parametrize("of_host", [False, True])
def test_each_number_is_drawn_once(comm: mpicomm.Communicator, xp: Any, window: MakeWindow, of_host: bool) -> None:
    module, win, rounds = np if of_host else xp, window(2), 20
    one, drawn = module.ones(1, np.int64), [module.zeros(1, np.int64) for _ in range(rounds)]
    win.Lock_all()
    for number in drawn:
        win.Fetch_and_op(one, number, comm.size - 1, 1)
    win.Unlock_all()
    comm.check()
    mine = [int(to_host(number)[0]) for number in drawn]
    assert sorted(number for each in comm.allgather(mine) for number in each) == list(range(rounds * comm.size))
    assert mine == sorted(mine)


def test_one_rank_wins_a_swap(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    for dtype in (np.int8, np.uint16, np.int32, np.int64):
        win = window(3, dtype)
        before = xp.full(1, 77, dtype)
        win.Fence()
        win.Compare_and_swap(xp.array([1 + comm.rank], dtype), xp.zeros(1, dtype), before, 0, 1)
        win.Fence()
        seen = comm.allgather(int(to_host(before)[0]))
        assert seen.count(0) == 1
        winner = 1 + seen.index(0)
        assert {*seen} <= {0, winner}
        if comm.rank == 0:
            assert to_host(win.tomemory().view(dtype)).tolist() == [0, winner, 0]
