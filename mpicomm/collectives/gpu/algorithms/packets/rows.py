"""Rows that the reducing kernel also normalises: which rows, and the threads that share them."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry
from mpicomm.kernels.epilogue import NORM_THREADS

_STEP_NBYTES = NORM_THREADS * SLOT_NBYTES  # of a row
_MOST_STEPS = 8  # of a row


class RowGeometry(NamedTuple):
    """The threads that share rows, and the steps that they take: see rows.cuh."""

    threads: Geometry
    steps: int

    @property
    def nbytes(self) -> int:
        """The bytes of all slots. Some slots get no packet, because a row may end within its last step."""
        return self.steps * self.threads.threads * SLOT_NBYTES


def most_groups(size: int, *, fan_out: bool) -> int:
    """Return the most groups of a block between ``size`` ranks: ``kGroups`` in rows.cuh."""
    return 1 if size > 2 or fan_out else 2


def fewest_rows(row_nbytes: int, most_blocks: int, shards: int) -> float:
    """Return the fewest rows of a call that the reducing kernel normalises; a later kernel normalises fewer.

    ``shards`` ranks each reduce a shard. Rows begin and end with whole packets. Only one group of threads takes a row,
    and in a plain reduction the threads of all multiprocessors share it. So a row has at most 8 steps, unless there is
    a row for each block.
    """
    if row_nbytes % SLOT_NBYTES != 0:
        return inf
    if shards > 1:
        # With fewer rows, some blocks would end a row of each shard, after the last packet, and others none. A later
        # kernel has blocks for all rows at once.
        return shards * (most_blocks - 1) + 1
    return 1 if row_nbytes <= _MOST_STEPS * _STEP_NBYTES else most_blocks


def row_geometry(count: int, row_nbytes: int, most_blocks: int, size: int, *, fan_out: bool) -> RowGeometry:
    """Return how the reducing kernel normalises ``count`` rows of the longest shard. The same on all ranks."""
    blocks = min(count, most_blocks)
    groups = min(most_groups(size, fan_out=fan_out), -(-count // blocks))
    steps = -(-count // (blocks * groups)) * -(-row_nbytes // _STEP_NBYTES)
    return RowGeometry(Geometry(blocks, groups * NORM_THREADS), steps)
