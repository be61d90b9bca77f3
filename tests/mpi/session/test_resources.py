"""What a process holds: nothing leaks, few descriptors are enough, and shared memory has no name."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError
from tests.helpers.faults.leaks import shared_files
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import array_module, communicator, require_memory_works
from tests.helpers.rigs.fd_exchanges import few_free_descriptors

FEW, MANY = 8, 40
"""Rounds of what has memory of its own, and of what shares chunks of memory, of which each holds several."""


def counts() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(shared_files()),
    }


def require_no_growth(cycle: Callable[[], object], rounds: int) -> None:
    def repeat() -> None:
        for _ in range(rounds):
            cycle()

    repeat()
    gc.collect()
    gc.disable()  # nothing is left to the garbage collector, which runs at any time
    try:
        before = counts()
        repeat()
        assert counts() == before
    finally:
        gc.enable()
    logging.disable()  # pytest keeps the warnings, such as the warning about ranks that share a GPU
    try:
        gc.collect()
        objects = len(gc.get_objects())
        repeat()
        gc.collect()
        assert len(gc.get_objects()) - objects < rounds
    finally:
        logging.disable(logging.NOTSET)


def array(comm: mpicomm.Communicator) -> None:
    with comm.zeros(10) as array:
        array.put(array.local, (comm.rank + 1) % comm.size)


def child(comm: mpicomm.Communicator) -> None:
    comm.Dup().Free()


def used_child(comm: mpicomm.Communicator) -> None:
    with comm.Dup() as child:
        require_memory_works(child)
        child.zeros(10)  # `Free` closes the rest
        child.empty((2, 3), np.int8).peer((comm.rank + 1) % comm.size)
        child.shared_event()


def whole(comm: mpicomm.Communicator) -> None:
    with communicator("cpu" if comm.device == "cpu" else "cuda") as own, array_module(own) as xp:
        own.zeros(10)
        own.Allreduce(MPI.IN_PLACE, xp.ones(10), algorithm="one_shot")


def event(comm: mpicomm.Communicator) -> None:
    comm.shared_event().close()


@pytest.mark.parametrize(
    ("cycle", "rounds"), [(array, MANY), (event, MANY), (child, FEW), (used_child, FEW), (whole, FEW)]
)
def test_what_is_closed_leaves_nothing(own_comm: mpicomm.Communicator, cycle: Any, rounds: int) -> None:
    require_no_growth(lambda: cycle(own_comm), rounds)


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


def shared_mappings() -> set[str]:
    fields = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {each[5] for each in fields if each[1].endswith("s") and len(each) == 6}


def test_shared_memory_has_no_name_by_which_a_stranger_finds_it(comm_world: MPI.Intracomm) -> None:
    with communicator("cpu"):
        pass  # descriptors that MPI opens at first
    before = shared_mappings()
    with communicator("cpu") as comm, comm.zeros(1000):
        comm.Allreduce(MPI.IN_PLACE, np.ones(1000), algorithm="one_shot")
        assert shared_mappings() - before <= {"/memfd:mpicomm (deleted)"}
