"""Tables of regions for the kernel that packs and unpacks memory of derived datatypes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from mpicomm.kernels.packing import ENTRY, ENTRY_NBYTES, LOOPS, UNIT_NBYTES, PackTable
from mpicomm.mpi.layout import DatatypeLayout, run_of
from mpicomm.mpi.regions import Region, at_blocks, rounds_of

_MOST_UNITS = 1 << 31  # the kernel counts the units of a region in 32 bits
_MOST_RUN_NBYTES = 1 << 30
_MOST_FIELDS = 16  # a thread passes all fields before its own


@dataclass(frozen=True)
class PackJob:
    """Elements of a datatype at address ``memory``, and their place in packed memory."""

    memory: int
    layout: DatatypeLayout
    packed: int


@lru_cache(maxsize=256)
def table_for(layout: DatatypeLayout) -> PackTable:
    """Return the table of one element.

    The launch gets the addresses of memory and packed memory as arguments. Local.
    """
    return table_of([PackJob(0, layout, 0)])


def table_of_blocks(displs: Sequence[int], nbytes: Sequence[int]) -> PackTable:
    """Return the table of blocks with these displacements and bytes, which are packed one after the other. Local."""
    return table_of([PackJob(0, DatatypeLayout(at_blocks(run_of(1).regions, 1, displs, nbytes, 1), 0, None), 0)])


def table_of(jobs: Iterable[PackJob]) -> PackTable:
    """Return the table that packs or unpacks all of ``jobs`` in one launch. Local."""
    structures = [
        (job, fields)
        for job in jobs
        for fields in _structures(part for each in job.layout.regions for part in _parts(each))
    ]
    num_regions = sum(len(fields) for _, fields in structures)
    lists, entries, units = _Lists(ENTRY_NBYTES * num_regions), [], 0
    for job, fields in structures:
        element_units = sum(map(_run_units, fields))
        end = units + fields[0].runs * element_units
        # The kernel takes the last region that begins at or before a unit. So all fields except the first begin at the
        # end.
        begins = [units, *[end] * (len(fields) - 1)]
        entries += [_entry(*each, job, element_units, lists) for each in zip(fields, begins, strict=True)]
        units = end
    return PackTable(b"".join([*entries, *lists.places]), num_regions, units, len(structures))


def _structures(parts: Iterable[Region]) -> Iterator[list[Region]]:
    """Join regions that are the fields of an array of structures. Yield every other region in a list with one item."""
    fields: list[Region] = []
    for part in parts:
        if fields and not _is_next_field(fields, part):
            yield fields
            fields = []
        fields.append(part)
    if fields:
        yield fields


def _is_next_field(fields: Sequence[Region], part: Region) -> bool:
    """Return whether the runs of a region follow the runs of ``fields``, in packed memory and in the same loops."""
    last = fields[-1]
    follows = part.loops == last.loops and part.packed == last.packed + last.run_nbytes
    units = part.runs * sum(map(_run_units, [*fields, part]))
    return bool(part.loops) and follows and len(fields) < _MOST_FIELDS and units < _MOST_UNITS


class _Lists:
    """The lists of a table, from offset ``end`` on. Equal lists are stored once."""

    def __init__(self, end: int) -> None:
        self.places: dict[bytes, int] = {}
        self._end = end

    def offset_of(self, places: bytes) -> int:
        """Return the offset of a list from the begin of the table."""
        found = self.places.setdefault(places, self._end)
        if found == self._end:
            self._end += len(places)
        return found


def _run_units(region: Region) -> int:
    return -(-region.run_nbytes // UNIT_NBYTES)


def _parts(region: Region) -> Iterator[Region]:
    """Cut a region into regions that the kernel can address, in the same order."""
    fits = region.run_nbytes <= _MOST_RUN_NBYTES
    if len(region.loops) <= LOOPS and region.runs * _run_units(region) < _MOST_UNITS and fits:
        yield region
    elif not region.loops:
        for start in range(0, region.run_nbytes, _MOST_RUN_NBYTES):
            yield replace(region.moved(start, start), run_nbytes=min(_MOST_RUN_NBYTES, region.run_nbytes - start))
    else:
        rounds = region.loops[0].rounds
        step = 1 if len(region.loops) > LOOPS or not fits else -(-rounds // 2)
        for start in range(0, rounds, step):
            yield from _parts(rounds_of(region, start, min(start + step, rounds)))


def _entry(region: Region, first_unit: int, job: PackJob, element_units: int, lists: _Lists) -> bytes:
    listed, found = LOOPS, 0
    counts, strides, packed_strides = [1] * LOOPS, [0] * LOOPS, [0] * LOOPS
    for place, loop in enumerate(reversed(region.loops)):
        counts[place], strides[place], packed_strides[place] = loop.rounds, loop.stride, loop.packed
        if loop.places:
            listed, found = place, lists.offset_of(loop.places)
    return ENTRY.pack(
        *((job.memory + region.offset) % (1 << 64), job.packed + region.packed, first_unit, found),
        *(region.run_nbytes, _run_units(region), listed, element_units),
        *(*counts, *strides, *packed_strides),
    )
