"""Geometry: the threads that share the packets of a message. Pure functions, the same on all ranks."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.packets.arguments import FEWEST_LAPS, SLOT_NBYTES, most_workers, parts_of
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


@cache
def geometries_of(
    most_blocks: int, size: int, *, fan_out: bool, coded: bool = False
) -> tuple[list[int], list[Geometry]]:
    """Return the most packets that geometries between ``size`` ranks move in one step, and these geometries.

    The last geometry, which has no such number, is for all longer messages. The choice is measured on H200s: one step
    if possible, with as many blocks as there are, each as small as one step allows. ``coded`` is as in `most_workers`.
    """
    most, units, geometries = most_workers(size, fan_out=fan_out, one_step=True), [0], list[Geometry]()
    for workers in (*(each for each in _WORKERS if each < most), most):
        of_one_block = [Geometry(1, few) for few in range(LANES, workers, LANES)]
        for geometry in (*of_one_block, *[Geometry(1 + more, workers) for more in range(most_blocks)]):
            if geometry.threads > units[-1]:
                units.append(geometry.threads)
                geometries.append(geometry)
    workers = most_workers(size, fan_out=fan_out, one_step=False, coded=coded)
    return units[1:], [*geometries, Geometry(most_blocks, workers)]


@cache
def geometry_within(inbox_nbytes: int, most_blocks: int, size: int, *, coded: bool = False) -> Geometry:
    """Return the geometry for messages of any length in inboxes of that size; the same on all ranks.

    It has the most threads for which an inbox still holds `FEWEST_LAPS` steps, because a launch reuses slots. ``coded``
    is as in `most_workers`.
    """
    slots = inbox_nbytes // SLOT_NBYTES // (parts_of(size, one_step=False) if coded else 1)
    room = slots // (FEWEST_LAPS * most_blocks) // LANES * LANES
    return Geometry(most_blocks, min(room, most_workers(size, fan_out=False, one_step=False, coded=coded)))


def most_blocks_of(domain: Domain) -> int:
    """Return the most blocks of a launch between the ranks of a domain."""
    return min(MAX_BLOCKS, domain.multiprocessors)
