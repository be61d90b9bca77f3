"""Regions of memory: runs of bytes that nested loops visit, how they repeat, and how neighbours join to fewer regions.

The functions take and return regions in the order of packed memory. The first region begins at byte 0 of packed memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Displacements = npt.NDArray[np.int64]


_DISPL_NBYTES = 8
"""The bytes of a displacement in the list of a loop."""
_REGION_NBYTES = 128
"""The bytes that a region needs in a table of regions. They decide which of two equal descriptions is shorter."""


class Loop(NamedTuple):
    """A loop of two rounds or more. Rounds lie ``stride`` bytes apart, or at listed displacements."""

    rounds: int
    stride: int
    """The distance of two rounds in memory; 0 for a loop with a list."""
    packed: int
    """The distance of two rounds in packed memory."""
    displs: bytes = b""
    """The displacement of each round from the region's offset, as int64; empty without a list. Bytes compare fast."""

    def displacements(self) -> Displacements:
        """Return the displacements in the list."""
        return np.frombuffer(self.displs, np.int64)


@dataclass(frozen=True)
class Region:
    """Runs of consecutive bytes that nested loops visit. At most one of the loops has a list."""

    offset: int
    """The bytes from the address of the buffer to the first run. The number may be negative."""
    loops: tuple[Loop, ...]
    """The outermost loop first."""
    run_nbytes: int
    packed: int = 0
    """The bytes from the begin of packed memory to the first run."""

    @property
    def runs(self) -> int:
        """The number of runs."""
        return math.prod(loop.rounds for loop in self.loops)

    @property
    def nbytes(self) -> int:
        """The bytes of all runs."""
        return self.run_nbytes * self.runs

    @property
    def ends(self) -> tuple[int, int]:
        """The first byte of all runs, and the byte after their last byte, from the address of the buffer on."""
        first = last = self.offset
        for loop in self.loops:
            reach = (loop.rounds - 1) * loop.stride
            low, high = (min(reach, 0), max(reach, 0))
            if loop.displs:
                low, high = int(loop.displacements().min()), int(loop.displacements().max())
            first, last = first + low, last + high
        return first, last + self.run_nbytes

    def moved(self, offset: int, packed: int) -> Region:
        """Return the region, moved by ``offset`` bytes in memory and by ``packed`` bytes in packed memory."""
        return replace(self, offset=self.offset + offset, packed=self.packed + packed)


Regions = tuple[Region, ...]


def packed_nbytes(regions: Iterable[Region]) -> int:
    """Return the bytes of regions in packed memory."""
    return sum(region.nbytes for region in regions)


def rounds_of(region: Region, start: int, stop: int) -> Region:
    """Return some rounds of the outermost loop of a region."""
    loop, *inner = region.loops
    displs, offset = b"", start * loop.stride
    if loop.displs:
        some_displs = loop.displacements()[start:stop]
        offset = int(some_displs[0])
        displs = (some_displs - offset).tobytes()
    some = [Loop(stop - start, loop.stride, loop.packed, displs)] if stop - start > 1 else []
    return replace(region.moved(offset, start * loop.packed), loops=(*some, *inner))


def repeated(regions: Regions, count: int, stride: int) -> Regions:
    """Return ``count`` copies of regions at equal distances."""
    if count == 0 or not regions:
        return ()
    nbytes = packed_nbytes(regions)
    return tuple(_looped(region, count, stride, nbytes) for region in regions)


def repeated_at(regions: Regions, displs: Displacements) -> Regions:
    """Return copies of regions at displacements in bytes."""
    steps = np.diff(displs)
    if (steps == steps[:1]).all():
        copies = repeated(regions, len(displs), int(steps[0]) if len(steps) else 0)
        return tuple(region.moved(int(displs[0]), 0) for region in copies)
    nbytes = packed_nbytes(regions)
    if any(loop.displs for region in regions for loop in region.loops):  # a region has at most one list
        return tuple(region.moved(displ, n * nbytes) for n, displ in enumerate(displs.tolist()) for region in regions)
    first = int(displs[0])
    loop = Loop(len(displs), 0, nbytes, (displs - first).tobytes())
    return tuple(replace(each, offset=each.offset + first, loops=(loop, *each.loops)) for each in regions)


def at_blocks(element: Regions, extent: int, displs: Sequence[int], counts: Sequence[int], unit: int) -> Regions:
    """Return blocks of elements. Each block has a displacement, in units of ``unit`` bytes, and a count."""
    lengths = np.array(counts, np.int64)
    starts = np.array(displs, np.int64)[lengths > 0] * unit
    lengths = lengths[lengths > 0]
    if not len(starts) or not element:
        return ()
    begins = np.flatnonzero(np.append(True, starts[1:] != (starts + lengths * extent)[:-1]))
    starts, lengths = starts[begins], np.add.reduceat(lengths, begins)
    # If it makes the table shorter, the loop cuts blocks of different lengths into blocks of one length.
    common = int(np.gcd.reduce(lengths))
    parts, changes = lengths // common, np.flatnonzero(np.diff(lengths)) + 1
    saved = _REGION_NBYTES * len(element) * len(changes)
    if _DISPL_NBYTES * (int(parts.sum()) - len(parts)) < saved:
        numbers = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        starts, changes = np.repeat(starts, parts) + numbers * (common * extent), changes[:0]
        lengths = np.full(len(starts), common)
    bounds = [0, *changes.tolist(), len(starts)]
    made: list[Region] = []
    packed = 0
    for start, stop in pairwise(bounds):
        block = repeated(element, int(lengths[start]), extent)
        made += (region.moved(0, packed) for region in repeated_at(block, starts[start:stop]))
        packed += packed_nbytes(block) * (stop - start)
    return joined(made)


def joined(regions: Iterable[Region]) -> Regions:
    """Join runs that follow each other, in memory and in packed memory."""
    made: list[Region] = []
    for region in regions:
        last = made[-1] if made and not made[-1].loops and not region.loops else None
        if last and (last.offset + last.run_nbytes, last.packed + last.run_nbytes) == (region.offset, region.packed):
            made[-1] = replace(last, run_nbytes=last.run_nbytes + region.run_nbytes)
        else:
            made.append(region)
    return tuple(made)


def _looped(region: Region, count: int, stride: int, packed: int) -> Region:
    """Return ``count`` copies of a region as one region, with as few loops as possible."""
    if count == 1:
        return region
    if not region.loops and stride == packed == region.run_nbytes:
        return replace(region, run_nbytes=region.run_nbytes * count)
    if region.loops and not region.loops[0].displs:
        outer = region.loops[0]
        if (outer.rounds * outer.stride, outer.rounds * outer.packed) == (stride, packed):  # each copy follows the last
            longer = outer._replace(rounds=outer.rounds * count)
            return replace(region, loops=(longer, *region.loops[1:]))
    return replace(region, loops=(Loop(count, stride, packed), *region.loops))
