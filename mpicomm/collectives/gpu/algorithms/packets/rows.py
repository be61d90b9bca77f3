"""Rows that the reducing kernel also normalises: which rows, and the threads that share them."""

from __future__ import annotations

from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry
from mpicomm.epilogues.base import Rows
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


def row_geometry(rows: Rows, most_blocks: int, size: int, *, fan_out: bool) -> RowGeometry | None:
    """Return how the reducing kernel normalises rows; None if a later kernel does. The same on all ranks.

    ``rows`` are the rows of the longest shard. Rows begin and end with whole packets. Only one group of threads takes a
    row, and in a plain reduction the threads of all multiprocessors share it. So a row has at most 8 steps, unless
    there is a row for each block.
    """
    if rows.count == 0 or rows.nbytes % SLOT_NBYTES != 0:
        return None
    blocks = min(rows.count, most_blocks)
    if blocks < most_blocks and rows.nbytes > _MOST_STEPS * _STEP_NBYTES:
        return None
    groups = min(most_groups(size, fan_out=fan_out), -(-rows.count // blocks))
    steps = -(-rows.count // (blocks * groups)) * -(-rows.nbytes // _STEP_NBYTES)
    return RowGeometry(Geometry(blocks, groups * NORM_THREADS), steps)
