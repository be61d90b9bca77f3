"""Tables of regions for the kernel that packs and unpacks memory of derived datatypes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from mpicomm.kernels.packing import LOOPS, UNIT_NBYTES, PackTable, RegionEntry
from mpicomm.mpi.layout import Layout, Region

_MOST_UNITS = 1 << 31  # the kernel counts the units of a region in 32 bits
_MOST_RUN_NBYTES = 1 << 30


@dataclass(frozen=True)
class PackJob:
    """Elements of a datatype at address ``memory``, and their place in packed memory."""

    memory: int
    layout: Layout
    packed: int


@lru_cache(maxsize=256)
def table_for(layout: Layout) -> PackTable:
    """Return the table of one element, whose memory and packed memory are arguments of the launch. Local."""
    return table_of([PackJob(0, layout, 0)])


def table_of(jobs: Iterable[PackJob]) -> PackTable:
    """Return the table that packs or unpacks all of ``jobs`` in one launch. Local."""
    entries: list[RegionEntry] = []
    units = 0
    for job in jobs:
        packed = job.packed
        for region in job.layout.regions:
            for part in _parts(region):
                entries.append(_entry(part, job.memory, packed, units))
                units += math.prod(count for count, _ in part.loops) * entries[-1].run_units
                packed += part.nbytes
    return PackTable(b"".join(map(bytes, entries)), len(entries), units)


def _parts(region: Region) -> Iterator[Region]:
    """Cut a region into regions that the kernel can address, in the same order."""
    if region.run_nbytes > _MOST_RUN_NBYTES and not region.loops:
        for start in range(0, region.run_nbytes, _MOST_RUN_NBYTES):
            yield Region(region.offset + start, (), min(_MOST_RUN_NBYTES, region.run_nbytes - start))
        return
    units = math.prod(count for count, _ in region.loops) * -(-region.run_nbytes // UNIT_NBYTES)
    if len(region.loops) <= LOOPS and units < _MOST_UNITS and region.run_nbytes <= _MOST_RUN_NBYTES:
        yield region
        return
    (count, stride), *inner = region.loops
    for number in range(count):
        yield from _parts(Region(region.offset + number * stride, tuple(inner), region.run_nbytes))


def _entry(region: Region, memory: int, packed: int, first_unit: int) -> RegionEntry:
    entry = RegionEntry(
        memory=(memory + region.offset) % (1 << 64),
        packed=packed,
        first_unit=first_unit,
        run_nbytes=region.run_nbytes,
        run_units=-(-region.run_nbytes // UNIT_NBYTES),
        counts=(1,) * LOOPS,
    )
    for place, (count, stride) in enumerate(reversed(region.loops)):
        entry.counts[place], entry.strides[place] = count, stride
    return entry
