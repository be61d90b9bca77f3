"""Rows that the kernel that reduces them normalises: which rows, and the threads among which they are spread."""

from __future__ import annotations

from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry
from mpicomm.epilogues.base import Rows
from mpicomm.kernels.epilogue import NORM_THREADS

_STEP_NBYTES = NORM_THREADS * SLOT_NBYTES  # of a row
_MOST_STEPS = 8  # of a row


class RowGeometry(NamedTuple):
    """The threads among which rows are spread, and the steps that they take: see rows.cuh."""

    threads: Geometry
    steps: int

    @property
    def nbytes(self) -> int:
        """The bytes of all slots, also of those that get no packet because a row ends before its last step does."""
        return self.steps * self.threads.threads * SLOT_NBYTES


def most_groups(size: int) -> int:
    """Return the most groups of a block between ``size`` ranks: ``kGroups`` in rows.cuh."""
    return 1 if size > 2 else 2


def row_geometry(rows: Rows, most_blocks: int, size: int) -> RowGeometry | None:
    """Return how the kernel that reduces normalises rows; None where a kernel behind does it. The same on all ranks.

    Rows begin and end with whole packets. A row has up to 8 steps, because one group of threads takes it, while the
    threads of a plain reduction share a long row among all multiprocessors.
    """
    if rows.count == 0 or rows.nbytes % SLOT_NBYTES != 0 or rows.nbytes > _MOST_STEPS * _STEP_NBYTES:
        return None
    blocks = min(rows.count, most_blocks)
    groups = min(most_groups(size), -(-rows.count // blocks))
    steps = -(-rows.count // (blocks * groups)) * -(-rows.nbytes // _STEP_NBYTES)
    return RowGeometry(Geometry(blocks, groups * NORM_THREADS), steps)
