"""Put and Get through windows of device memory, in fence epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import to_host
from tests.mpi.windows.conftest import MakeWindow


def test_put_and_get_go_around_the_ranks(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, right, left = window(10, fill=-1), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine = win.tomemory().view(np.int64)
    win.Fence()
    for turn in range(20):
        win.Put(xp.array([turn, comm.rank]), right, 4)
        win.Fence()
        assert to_host(mine).tolist() == [-1] * 4 + [turn, left] + [-1] * 4
        seen = xp.zeros(3, np.int64)
        win.Get(seen, right, (3,))
        win.Fence()
        assert to_host(seen).tolist() == [-1, turn, comm.rank]


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


def test_host_arrays_are_origins_and_results(comm: mpicomm.Communicator, window: MakeWindow) -> None:
    win, right, left = window(4), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    win.Fence()
    win.Put(np.full(3, 5 + comm.rank), right, 1)
    win.Fence()
    seen = np.zeros(4, np.int64)
    win.Get(seen, comm.rank)
    win.Fence()
    assert seen.tolist() == [0, *[5 + left] * 3]


def every_second(count: int) -> MPI.Datatype:
    return MPI.INT64_T.Create_vector(count, 1, 2).Commit()


@pytest.mark.parametrize("of_host", [False, True])
def test_derived_datatypes_go_on_both_sides(
    comm: mpicomm.Communicator, xp: Any, window: MakeWindow, of_host: bool
) -> None:
    module = np if of_host else xp
    win, right, left = window(12, fill=-1), (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    mine, three = win.tomemory().view(np.int64), every_second(3)
    numbers = module.arange(8) + 10 * comm.rank
    theirs = 10 * left
    win.Fence()
    win.Put([numbers, 1, three], right, (0, 3, MPI.INT64_T))  # packed
    win.Put(numbers[:3], right, (4, 1, three))  # unpacked
    win.Put([numbers, 1, three], right, (7, 1, three))  # both
    win.Fence()
    rows = to_host(mine).tolist()
    assert rows[:3] == [theirs, theirs + 2, theirs + 4]
    assert rows[3:] == [-1, theirs, -1, theirs + 1, theirs, theirs + 2, theirs + 2, -1, theirs + 4]
    three.Free()


def test_derived_datatypes_are_read_from_both_sides(comm: mpicomm.Communicator, xp: Any, window: MakeWindow) -> None:
    win, right, three = window(8), (comm.rank + 1) % comm.size, every_second(3)
    win.tomemory().view(np.int64)[...] = xp.arange(8) + 10 * comm.rank
    packed, spread, both = (xp.full(6, -1, np.int64) for _ in range(3))
    first = 10 * right
    win.Fence()
    win.Get(packed[:3], right, (1, 1, three))
    win.Get([spread, 1, three], right, (0, 3, MPI.INT64_T))
    win.Get([both, 1, three], right, (2, 1, three))
    win.Fence()
    assert to_host(packed).tolist() == [first + 1, first + 3, first + 5, -1, -1, -1]
    assert to_host(spread).tolist() == [first, -1, first + 1, -1, first + 2, -1]
    assert to_host(both).tolist() == [first + 2, -1, first + 4, -1, first + 6, -1]
    three.Free()


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
