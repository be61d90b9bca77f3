from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import settle

MakeWindow = Callable[..., mpicomm.Win]


@pytest.fixture
def window(comm: mpicomm.Communicator) -> Iterator[MakeWindow]:
    """Make windows of device memory, filled with ``fill``; they are freed after the test."""
    made: list[mpicomm.Win] = []

    def make(count: int, dtype: Any = np.int64, *, fill: Any = 0, disp_unit: int = 0) -> mpicomm.Win:
        itemsize = np.dtype(dtype).itemsize
        win = mpicomm.Win.Allocate(count * itemsize, disp_unit or itemsize, MPI.INFO_NULL, comm, place="device")
        made.append(win)
        win.tomemory().view(dtype)[...] = fill
        settle(comm)  # no rank accesses a part that its rank has yet to fill
        return win

    yield make
    comm.check()
    for win in made:
        if win != MPI.WIN_NULL:
            win.Free()
