"""Put, Get, accumulates, fetches and swaps through windows of device memory, from all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.fakes.window_devices import FakeCupy
from tests.helpers.rigs.communicators import to_host
from tests.mpi.windows.conftest import MakeWindow


@pytest.mark.parametrize("count", [0, 1, 3, 100_000])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.complex128])
def test_any_number_of_elements_moves(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, dtype: Any, count: int
) -> None:
    win, right, left = window(count + 2, dtype), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win.Fence()
    win.Put(xp.full(count, 1 + comm.rank, dtype), right, 1)
    win.Fence()
    assert (to_host(win.tomemory().view(dtype)) == [0, *[1 + left] * count, 0]).all()


@pytest.mark.parametrize("origin", ["array", "array and type", "array, count and type"])
def test_origins_and_targets_have_the_forms_of_mpi4py(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, origin: str
) -> None:
    values = xp.arange(6, dtype=np.int32)
    spec = {
        "array": values[:4],
        "array and type": [values[:4], MPI.INT32_T],
        "array, count and type": [values, 4, MPI.INT32_T],
    }[origin]
    for target in (2, [2], (2, 4), (2, 4, MPI.INT32_T), (2, 16, MPI.BYTE)):
        win = window(8, np.int32)
        win.Fence()
        win.Put(spec, comm.rank, target)
        win.Fence()
        assert to_host(win.tomemory().view(np.int32)).tolist() == [0, 0, 0, 1, 2, 3, 0, 0]


def test_requests_complete_with_the_data(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, right, left = window(4), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win.Lock_all()
    requests = [win.Rput(xp.full(2, 1 + comm.rank), right, 2 * number) for number in range(2)]
    MPI.Request.Waitall(requests)
    comm.Barrier()
    seen = xp.zeros(4, np.int64)
    request = win.Rget(seen, left)
    request.Wait()
    assert to_host(seen).tolist() == [1 + (left - 1) % comm.size] * 4
    while not win.Rput(xp.zeros(0, np.int64), right).Test():
        pass
    assert win.Rput(xp.ones(1), MPI.PROC_NULL).Wait()
    win.Unlock_all()
    comm.Barrier()


def test_nothing_goes_to_proc_null(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win = window(2, fill=3)
    win.Fence()
    win.Put(xp.ones(100), MPI.PROC_NULL, 77)
    win.Get(xp.ones(100), MPI.PROC_NULL)
    win.Accumulate(xp.ones(100), MPI.PROC_NULL)
    win.Fence()
    assert to_host(win.tomemory().view(np.int64)).tolist() == [3, 3]


OPERATIONS: dict[str, tuple[MPI.Op, Callable[[Any, Any], Any], tuple[str, ...]]] = {
    "SUM": (MPI.SUM, np.add, ("int8", "int32", "uint64", "float32", "float64", "complex64")),
    "PROD": (MPI.PROD, np.multiply, ("int16", "uint32", "float64")),
    "MAX": (MPI.MAX, np.maximum, ("int8", "uint16", "int64", "float32")),
    "MIN": (MPI.MIN, np.minimum, ("uint8", "int32", "float64")),
    "LAND": (MPI.LAND, np.logical_and, ("int32", "bool")),
    "LOR": (MPI.LOR, np.logical_or, ("uint8", "int64")),
    "LXOR": (MPI.LXOR, np.logical_xor, ("int32",)),
    "BAND": (MPI.BAND, np.bitwise_and, ("uint8", "uint32", "int64")),
    "BOR": (MPI.BOR, np.bitwise_or, ("int16", "int32")),
    "BXOR": (MPI.BXOR, np.bitwise_xor, ("int32", "uint64")),
}


@pytest.mark.parametrize(("name", "dtype"), [(name, dtype) for name, row in OPERATIONS.items() for dtype in row[2]])
def test_all_ranks_accumulate_into_the_same_elements(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, name: str, dtype: str
) -> None:
    op, function, _ = OPERATIONS[name]
    start = (np.arange(20) % 3).astype(dtype)
    parts = [((np.arange(20) + rank) % 3).astype(dtype) for rank in range(comm.size)]
    win = window(20, dtype, fill=xp.asarray(start))
    before = xp.zeros(20, dtype)
    win.Fence()
    win.Accumulate(xp.asarray(parts[comm.rank]), 0, op=op)
    win.Fence()
    win.Get_accumulate(None, before, 0, op=MPI.NO_OP)
    win.Fence()
    expected = start
    for part in parts:
        expected = function(expected, part).astype(dtype)
    assert np.array_equal(to_host(before), expected)


PAIRS = {"FLOAT_INT": "f4", "DOUBLE_INT": "f8", "LONG_INT": "i8", "TWOINT": "i4", "SHORT_INT": "i2"}


def pair(name: str) -> tuple[MPI.Datatype, np.dtype[Any]]:
    return getattr(MPI, name), np.dtype([("value", PAIRS[name]), ("index", "i4")], align=True)


@pytest.mark.parametrize("op", ["MINLOC", "MAXLOC"])
@pytest.mark.parametrize("name", PAIRS)
def test_pairs_of_a_value_and_an_index_are_compared(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, name: str, op: str
) -> None:
    datatype, dtype = pair(name)
    extent = dtype.itemsize
    parts = np.zeros((comm.size, 6), dtype)
    parts["value"] = np.random.default_rng(1).integers(0, 4, parts.shape)
    parts["index"] = 10 * np.arange(comm.size)[:, None] + np.arange(6)
    win = window(6 * extent, np.uint8, disp_unit=extent)
    win.Fence()
    win.Accumulate([xp.asarray(parts[0].view(np.uint8)), 6, datatype], 0, (0, 6, datatype), MPI.REPLACE)
    win.Fence()
    before = xp.zeros(6 * extent, np.uint8)
    win.Get_accumulate([xp.asarray(parts[comm.rank].view(np.uint8)), 6, datatype], [before, 6, datatype], 0, 0,
                       getattr(MPI, op))  # fmt: skip
    win.Fence()
    win.Fetch_and_op(None, [before, 1, datatype], 0, 5, MPI.NO_OP)
    win.Get([before[extent:], 5, datatype], 0, 0)
    win.Fence()
    expected = []
    for column in range(6):
        best = parts["value"][:, column].min() if op == "MINLOC" else parts["value"][:, column].max()
        expected.append((best, parts["index"][parts["value"][:, column] == best, column].min()))
    found = to_host(before).view(dtype)
    assert [(each["value"], each["index"]) for each in found] == [expected[5], *expected[:5]]


@pytest.mark.parametrize("op", ["REPLACE", "MAXLOC"])
@pytest.mark.parametrize("name", PAIRS)
def test_derived_datatypes_of_pairs_are_updated(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, name: str, op: str
) -> None:
    datatype, dtype = pair(name)
    extent = dtype.itemsize
    row, column = datatype.Create_contiguous(2).Commit(), datatype.Create_vector(2, 1, 2).Commit()
    mine = np.zeros(4, dtype)
    mine["value"], mine["index"] = [1, 2, 3, 4], comm.rank
    win, right, left = window(4 * extent, np.uint8, disp_unit=extent), *neighbours(comm)
    origin = xp.asarray(mine.view(np.uint8))
    for made, target, places in ((row, (1, 1, row), [1, 2]), (column, (0, 1, column), [0, 2])):
        win.Fence()
        win.Accumulate([origin, 1, made], right, target, getattr(MPI, op))
        win.Fence()
        comm.check()
        found = to_host(win.tomemory()).view(dtype)[places]
        sent = [1, 2] if made is row else [1, 3]
        assert [(each["value"], each["index"]) for each in found] == [(each, left) for each in sent]
    for made in (row, column):
        made.Free()


def neighbours(comm: mpicomm.Communicator) -> tuple[int, int]:
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


def test_an_operation_of_the_user_accumulates(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    if type(xp) is FakeCupy:
        pytest.skip("doubles of GPUs have no operations of users")
    win = window(3, np.float64)
    win.Fence()
    win.Accumulate(xp.array([1.0, 2.0, -7.0]) * (1 + comm.rank), 0, op=mpicomm.Op("max(a, abs(b))"))
    win.Fence()
    if comm.rank == 0:
        assert to_host(win.tomemory().view(np.float64)).tolist() == [comm.size, 2 * comm.size, 7 * comm.size]


def test_elements_are_replaced_and_fetched(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, right = window(4, fill=9), (comm.rank + 1) % comm.size
    before = xp.zeros(2, np.int64)
    win.Fence()
    win.Get_accumulate(xp.array([comm.rank, 5]), before, right, 1, MPI.REPLACE)
    win.Fence()
    assert to_host(before).tolist() == [9, 9]
    assert to_host(win.tomemory().view(np.int64)).tolist() == [9, (comm.rank - 1) % comm.size, 5, 9]


@pytest.mark.parametrize("of_host", [False, True])
def test_each_number_is_drawn_once(comm: mpicomm.Communicator, xp: Any, window: MakeWindow, of_host: bool) -> None:
    module, win, rounds = np if of_host else xp, window(2), 50
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


def test_elements_of_derived_datatypes_accumulate(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    pairs = MPI.FLOAT.Create_vector(3, 2, 4).Commit()
    win = window(12, np.float32)
    win.Fence()
    win.Accumulate([xp.arange(12, dtype=np.float32), 1, pairs], 0, (1, 1, pairs))
    win.Accumulate(xp.ones(6, np.float32), 0, (0, 1, pairs))
    before = xp.zeros(12, np.float32)
    win.Fence()
    win.Get_accumulate(None, [before, 1, pairs], 0, (1, 1, pairs), MPI.NO_OP)
    win.Fence()
    size = comm.size
    expected = np.zeros(12)
    for place, value in zip([1, 2, 5, 6, 9, 10], [0, 1, 4, 5, 8, 9], strict=True):
        expected[place] += size * value
    for place in (0, 1, 4, 5, 8, 9):
        expected[place] += size
    if comm.rank == 0:
        assert to_host(win.tomemory().view(np.float32)).tolist() == expected.tolist()
    assert to_host(before)[[0, 1, 4, 5, 8, 9]].tolist() == expected[[1, 2, 5, 6, 9, 10]].tolist()
    pairs.Free()


def test_requests_of_accumulates_complete(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, before = window(2), xp.zeros(2, np.int64)
    win.Lock(comm.rank)
    MPI.Request.Waitall([win.Raccumulate(xp.array([1, 2]), comm.rank), win.Raccumulate(xp.array([3, 4]), comm.rank)])
    win.Rget_accumulate(xp.array([5, 6]), before, comm.rank).Wait()
    win.Unlock(comm.rank)
    assert to_host(before).tolist() == [4, 6]
    assert to_host(win.tomemory().view(np.int64)).tolist() == [9, 12]
