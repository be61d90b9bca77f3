"""Nothing leaks: after dozens of rounds a process holds no more than at first."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.rigs.communicators import communicator, require_memory_works

WARM_UP = 20


def counts() -> dict[str, int]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "shared mappings": sum(line.split()[1].endswith("s") for line in maps),
        "threads": len(os.listdir("/proc/self/task")),
    }


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Leave nothing to the garbage collector, which runs at any time."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def nothing_logged() -> Iterator[None]:
    """Do not count the warnings that pytest keeps, such as the warning about ranks that share a GPU."""
    logging.disable()
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def cycles_on(device: str) -> int:
    # Each round that leaks shows at once, save for files, of which other programs make some meanwhile.
    return 120 // MPI.COMM_WORLD.size if device == "cpu" else 50


def require_no_growth(cycle: Callable[[], object], cycles: int) -> None:
    with garbage_kept():
        for _ in range(WARM_UP):
            cycle()
        before, files = counts(), len(os.listdir("/dev/shm"))
        for _ in range(cycles):
            cycle()
        assert counts() == before
        # Other programs have files there, too.
        assert len(os.listdir("/dev/shm")) - files < cycles / 2
    with nothing_logged():
        gc.collect()
        objects = len(gc.get_objects())
        for _ in range(WARM_UP):
            cycle()
        gc.collect()
        assert len(gc.get_objects()) - objects < WARM_UP


def test_arrays_leave_nothing(device: str) -> None:
    with communicator(device) as comm:

        def cycle() -> None:
            with comm.zeros(10) as array:
                array.put(array.local, (comm.rank + 1) % comm.size)

        require_no_growth(cycle, cycles_on(device))


def test_arrays_left_to_free_leave_nothing(device: str) -> None:
    with communicator(device) as parent:

        def cycle() -> None:
            with parent.Dup() as comm:
                comm.zeros(10)
                comm.empty((2, 3), np.int8).peer((comm.rank + 1) % comm.size)
                comm.shared_event()

        require_no_growth(cycle, cycles_on(device) // 2)


def test_communicators_leave_nothing(device: str) -> None:
    def cycle() -> None:
        with communicator(device) as comm:
            comm.zeros(10)

    require_no_growth(cycle, cycles_on(device))


def test_events_leave_nothing(device: str) -> None:
    with communicator(device) as comm:
        require_no_growth(lambda: comm.shared_event().close(), cycles_on(device))


@pytest.mark.parametrize("used", [False, True], ids=["unused", "used"])
def test_children_leave_nothing(own_comm: mpicomm.Communicator, device: str, used: bool) -> None:
    def cycle() -> None:
        with own_comm.Dup() as child:
            if used:
                require_memory_works(child)

    require_no_growth(cycle, cycles_on(device) // 2)
