"""Geometry: the threads among which the packets of a message are spread. Pure functions, the same on all ranks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.packets.arguments import FEWEST_LAPS, SLOT_NBYTES, most_workers
from mpicomm.kernels.team import LANES

MAX_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_WORKERS = (128, 256, 512)


class Geometry(NamedTuple):
    """``workers`` threads of each block move data."""

    blocks: int
    workers: int

    @property
    def threads(self) -> int:
        """All threads that move data."""
        return self.blocks * self.workers

    def steps(self, units: int) -> int:
        """Return the steps for messages of ``units`` packets; at least one, because each rank must meet its peers."""
        return -(-units // (self.blocks * self.workers)) or 1


def geometry_of(units: int, most_blocks: int, size: int, *, fan_out: bool) -> Geometry:
    """Return the geometry for messages of ``units`` packets between ``size`` ranks; the same on all of them.

    As measured on H200s: one step if that is possible, with as many blocks as there are, each as small as that allows.
    """
    for most_units, units_of_each, shapes in _rungs(most_blocks, size, fan_out):
        if units <= most_units:
            return shapes[-(-units // units_of_each) - 1]
    return Geometry(most_blocks, most_workers(size, fan_out=fan_out, one_step=False))


_Rung = tuple[int, int, list[Geometry]]
"""The most packets of a rung. Packets of the given number lead to the next of its geometries."""


@cache
def _rungs(most_blocks: int, size: int, fan_out: bool) -> list[_Rung]:
    """Return the geometries that move packets in one step: for each size of blocks a smaller block, or up to all."""
    most, rungs = most_workers(size, fan_out=fan_out, one_step=True), list[_Rung]()
    for workers in (*(each for each in _WORKERS if each < most), most):
        smaller = [Geometry(1, few) for few in range(LANES, workers + 1, LANES)]
        rungs.append((workers, LANES, smaller))
        rungs.append((workers * most_blocks, workers, [Geometry(1 + more, workers) for more in range(most_blocks)]))
    return rungs


@cache
def geometry_within(inbox_nbytes: int, most_blocks: int, size: int) -> Geometry:
    """Return the geometry for messages of any length in inboxes of that size; the same on all ranks.

    It has as many threads as leave an inbox the steps that it needs to be used again within a launch.
    """
    room = inbox_nbytes // SLOT_NBYTES // (FEWEST_LAPS * most_blocks) // LANES * LANES
    return Geometry(most_blocks, min(room, most_workers(size, fan_out=False, one_step=False)))
