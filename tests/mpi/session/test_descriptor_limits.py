"""Limits on descriptors (ulimit -n): the number that a communicator needs, and the error if it has too few."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, require_memory_works
from tests.helpers.rigs.fd_exchanges import few_free_descriptors


def test_any_number_of_arrays_and_communicators_does_with_few_descriptors() -> None:
    with communicator("cpu") as comm, few_free_descriptors(20):
        arrays = [comm.zeros(10) for _ in range(50)]
        children = [comm.Dup() for _ in range(10)]
        for child in children:
            require_memory_works(child)
            child.Allreduce(MPI.IN_PLACE, np.ones(10), algorithm="one_shot")
            child.Free()
        for array in arrays:
            array.close()


@pytest.mark.parametrize("culprit", FIRST_AND_LAST)
def test_too_few_descriptors_on_one_rank_name_the_limit_on_all(culprit: int) -> None:
    # A rank without a descriptor for a socket sends nothing, for which its peers wait.
    with communicator("cpu", timeout_s=stretched(2.0)) as comm:
        require_memory_works(comm)
        failures = 0
        while said := _failure_with(failures, comm, culprit):
            assert f"rank {culprit}" in said
            assert "files open: raise the limit (ulimit -n)" in said
            failures += 1
        assert 0 < failures < 10 + comm.size
        require_memory_works(comm)


def _failure_with(free: int, comm: mpicomm.Communicator, culprit: int) -> str:
    """Make an array with few free descriptors on one rank; return the text of the error, or ""."""
    with few_free_descriptors(free) if WORLD.rank == culprit else contextlib.nullcontext():
        try:
            comm.zeros(10).close()
        except HandleError as error:
            return str(error)
    return ""
