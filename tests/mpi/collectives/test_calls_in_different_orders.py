"""Ranks that leave a collective on GPUs early, and go into a call by MPI that a peer has made before it.

On the host the engine of the host stands for the engine of GPUs.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.log import logger
from mpicomm.waiting import wait_until
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.device_calls import on_host_engine
from tests.helpers.rigs.message_rigs import on_threads

WORLD = MPI.COMM_WORLD
LAST = WORLD.size - 1

if WORLD.size == 1:
    pytest.skip("one rank has no others that make calls in another order", allow_module_level=True)


def bcast_in_two_orders(comm: Any, array: Any, said: list[str]) -> None:
    """The last rank makes its call by MPI before the Bcast on GPUs. All ranks wait for their errors."""
    comm.Bcast(array)  # all ranks set up memory
    comm.check()
    WORLD.Barrier()
    if comm.rank != LAST:
        comm.Bcast(array)
    request = comm.Iallreduce(np.ones(3), np.zeros(3))  # the blocking form of another call would wait for ever
    assert wait_until(lambda: bool(said), HANG_S)
    request.Wait()
    WORLD.Barrier()
    if comm.rank == LAST:
        comm.Bcast(array)
    comm.check()


def is_watching() -> bool:
    return any(thread.name == "mpicomm-order" for thread in threading.enumerate())


def test_the_errors_of_all_ranks_name_the_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    watched_before = is_watching()  # a communicator of another test is still alive
    said: list[str] = []
    monkeypatch.setattr(logger, "error", lambda text, *values: said.append(text % values))
    with communicator(device, timeout_s=stretched(2.0)) as comm, array_module(comm) as xp:
        if device == "cpu":
            child, made_of_threads = on_threads(comm)
            with on_host_engine(child):
                bcast_in_two_orders(child, DeviceArray(made_of_threads, np.ones(3)), said)
        else:
            child = comm.Dup()
            bcast_in_two_orders(child, xp.ones(3), said)
        child.Free()
    assert watched_before or wait_until(lambda: not is_watching(), HANG_S)
    (text,) = said
    assert "ranks have called different things of " in text and "make all collective calls on all ranks" in text
    assert "rank 0: Allreduce by MPI, its call 1 by MPI, after 2 other calls (the last is Bcast(" in text
    assert f"rank {LAST}: Allreduce by MPI, its call 1 by MPI, after 1 other call (the last is Bcast(" in text
