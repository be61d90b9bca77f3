"""A rank comes to a call after the others have given up: it raises as they did, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpicomm
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator

TIMEOUT_S = 0.5


def create_group(comm: mpicomm.Communicator) -> None:
    comm.Create_group(comm.Get_group())


def multiply(name: str) -> Callable[[mpicomm.Communicator], Any]:
    return lambda comm: getattr(comm, name)(np.ones((4 * comm.size, 4)), np.ones((4, 2)))


def reduce_in_shared_memory(comm: mpicomm.Communicator) -> None:
    comm.Allreduce(np.ones(64), np.empty(64), algorithm="one_shot")


CALLS: dict[str, Callable[[mpicomm.Communicator], Any]] = {
    "Communicator": lambda comm: mpicomm.Communicator(comm, device="cpu", timeout_s=stretched(TIMEOUT_S)),
    "Split": lambda comm: comm.Split(),
    "Create_group": create_group,
    "zeros": lambda comm: comm.zeros(3),
    "shared_event": lambda comm: comm.shared_event(),
    "suspend": lambda comm: comm.suspend(),
    "Free": lambda comm: comm.Free(),
    "Allreduce": reduce_in_shared_memory,
    "allgather_matmul": multiply("allgather_matmul"),
    "matmul_reduce_scatter": multiply("matmul_reduce_scatter"),
    "matmul_allreduce": multiply("matmul_allreduce"),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("late", FIRST_AND_LAST)
def test_a_rank_that_comes_after_the_others_have_given_up_raises_as_they_did(device: str, name: str, late: int) -> None:
    comm = communicator(device, timeout_s=stretched(TIMEOUT_S))
    reduce_in_shared_memory(comm)  # sets up the memory of later calls
    if WORLD.rank == late:
        WORLD.Barrier()
    with pytest.raises(mpicomm.CollectiveTimeoutError, match=f"rank {late} did not|rank {late} has not"):
        CALLS[name](comm)
    if WORLD.rank != late:
        WORLD.Barrier()
    WORLD.Barrier()  # a communicator that is still whole waits in Free for ranks that are late
    comm.Free()
