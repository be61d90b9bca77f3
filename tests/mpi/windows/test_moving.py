"""Put and Get through windows of device memory, in fence epochs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
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
