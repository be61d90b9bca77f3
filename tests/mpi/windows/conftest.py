from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.fakes.window_devices import FakeCupy
from tests.helpers.rigs.communicators import array_module, settle
from tests.helpers.rigs.message_rigs import on_window_device
from tests.mpi.conftest import shared_by_tests

MakeWindow = Callable[..., mpicomm.Win]


@pytest.fixture(scope="module")
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    """A communicator on GPUs; without GPUs their doubles, whose calls are complete on return."""
    if device == "cuda":
        with shared_by_tests(device) as shared:
            yield shared
    else:
        with on_window_device() as (double, threads):
            threads.completes = True
            yield double


@pytest.fixture
def xp(comm: mpicomm.Communicator, device: str) -> Iterator[Any]:
    """CuPy, or its double."""
    if device == "cuda":
        with array_module(comm) as module:
            yield module
    else:
        yield FakeCupy(comm._session.backend)  # type: ignore[arg-type]


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
