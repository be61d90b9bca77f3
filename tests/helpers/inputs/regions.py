"""Regions for tests, whose runs follow each other in packed memory unless a test says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.mpi.regions import Loop, Region


def region(
    offset: int,
    loops: Sequence[tuple[int, int] | Sequence[int]],
    run_nbytes: int,
    packed: int = 0,
    strides: Sequence[int] | None = None,
) -> Region:
    """Return a region. A loop is a tuple of its rounds and its stride, or a list of places.

    ``strides`` are the strides in packed memory; without them the runs follow each other.
    """
    made: list[Loop] = []
    stride = run_nbytes
    for number, loop in reversed(list(enumerate(loops))):
        step = stride if strides is None else strides[number]
        if isinstance(loop, tuple):
            made.insert(0, Loop(loop[0], loop[1], step))
        else:
            made.insert(0, Loop(len(loop), 0, step, np.array(loop, np.int64).tobytes()))
        stride = step * made[0].rounds
    return Region(offset, tuple(made), run_nbytes, packed)


def layout(*regions: Region) -> DatatypeLayout:
    """Return the layout of regions that follow each other in packed memory."""
    moved, packed = [], 0
    for each in regions:
        moved.append(each.moved(0, packed))
        packed += each.nbytes
    return DatatypeLayout(tuple(moved), 0, None)
