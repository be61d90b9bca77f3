"""Derived datatypes on GPUs: a collective on packed memory, and the tables of the kernel that packs and unpacks.

MPI lets the ranks of a call use datatypes of different layout if they name the same basic elements. Packed memory holds
these elements one after the other. So all algorithms serve all datatypes, and ranks with plain arrays can meet ranks
with derived datatypes. If each block of a buffer is one run of bytes, nothing is packed, and the buffer stays in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from mpicomm.kernels.packing import ENTRY, ENTRY_NBYTES, LOOPS, UNIT_NBYTES, PackTable
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.layout import DatatypeLayout, Elements, run_of
from mpicomm.mpi.regions import Region, at_blocks, rounds_of

_ALIGNED_NBYTES = 256
_MOST_UNITS = 1 << 31  # the kernel counts the units of a region in 32 bits
_MOST_RUN_NBYTES = 1 << 30
_MOST_STRIDED_NBYTES = 1 << 32
_MOST_FIELDS = 16  # a thread passes all fields before its own


class Strides(NamedTuple):
    """The gaps in a block: nested loops visit its runs. Kernels move such a block without packing it."""

    run_nbytes: int
    grain: int
    """A power of two up to `UNIT_NBYTES`, which divides the run and all strides."""
    counts: tuple[int, ...]
    """The innermost loop first; 1 for a loop that does not exist."""
    strides: tuple[int, ...]

    @classmethod
    def of(cls, layout: DatatypeLayout) -> Strides | None:
        """Return the gaps of a layout that is not one run; None if kernels need it packed."""
        if len(layout.regions) != 1 or layout.nbytes >= _MOST_STRIDED_NBYTES:
            return None
        (region,) = layout.regions
        if len(region.loops) > LOOPS or any(loop.places for loop in region.loops):
            return None
        rest = LOOPS - len(region.loops)
        strides = [loop.stride for loop in reversed(region.loops)]
        common = gcd(UNIT_NBYTES, region.run_nbytes, *strides)
        counts = (*(loop.rounds for loop in reversed(region.loops)), *[1] * rest)
        return cls(region.run_nbytes, common, counts, (*strides, *[0] * rest))


@dataclass(frozen=True)
class PackJob:
    """Elements of a datatype at address ``memory``, and their place in packed memory."""

    memory: int
    layout: DatatypeLayout
    packed: int


@dataclass(frozen=True)
class Packed:
    """The buffers of a call. Buffers with gaps in a block lie in scratch memory; their pointers are offsets."""

    send: Operand | None
    receive: Operand | None
    nbytes: int
    """The bytes of scratch memory."""
    before: tuple[PackJob, ...]
    """The elements that are packed before the collective."""
    after: tuple[PackJob, ...]
    """The elements that are unpacked after it."""
    strides: tuple[Strides | None, ...] = ()
    """The gaps in the blocks of both buffers that stay in place; empty if there are none."""

    @classmethod
    def of(
        cls,
        send: Operand | None,
        receive: Operand | None,
        *,
        input_in_receive: bool,
        receives: bool,
        as_bytes: bool,
        strided: bool = False,
    ) -> Packed | None:
        """Return the call on packed memory; None if no buffer has a derived datatype.

        With ``strided`` a buffer stays in place if `Strides` describe all of its blocks.

        ``input_in_receive`` is whether this rank's input lies in its receive buffer. ``receives`` is whether this rank
        receives into that buffer. ``as_bytes`` is for calls in which each pair of ranks may use other types.
        """
        given = [operand for operand in (send, receive) if operand is not None]
        if not any(operand.derived for operand in given):
            return None
        dtype = types.BYTE if as_bytes else _common_dtype(given)
        strides: tuple[Strides | None, ...] = ()
        if strided:
            (send, of_send), (receive, of_receive) = _strided(send, dtype), _strided(receive, dtype)
            strides = (*of_send, *of_receive)
        packed_send, sent, nbytes = _pack(send, dtype, 0)
        packed_receive, received, nbytes = _pack(receive, dtype, nbytes)
        before = (*sent, *(received if input_in_receive else ()))
        after = received if receives else ()
        return cls(packed_send, packed_receive, nbytes, before, after, strides if any(strides) else ())

    def placed(self, scratch: int) -> tuple[Operand | None, Operand | None]:
        """Return the buffers. Packed buffers get addresses in the memory at ``scratch``."""
        send, receive = (
            operand
            if operand is None or operand.derived is None
            else replace(operand, pointer=operand.pointer + scratch)
            for operand in (self.send, self.receive)
        )
        return send, receive


def _common_dtype(operands: list[Operand]) -> np.dtype[Any]:
    """Return the type of all basic elements; ``types.BYTE`` if there are several types."""
    found: set[np.dtype[Any]] = set()
    for operand in operands:
        if operand.derived is None:
            assert operand.dtype is not None
            found.add(operand.dtype)
        else:
            found.update(block.layout.dtype or types.BYTE for block in operand.derived)
    return found.pop() if len(found) == 1 else types.BYTE


def _pack(operand: Operand | None, dtype: np.dtype[Any], at: int) -> tuple[Operand | None, tuple[PackJob, ...], int]:
    """Return an operand in elements of ``dtype``, the jobs that pack it from offset ``at`` on, and the next offset."""
    if operand is None:
        return None, (), at
    if operand.derived is None:
        assert operand.dtype is not None
        factor = operand.dtype.itemsize // dtype.itemsize
        counts, displs = (
            None if numbers is None else tuple(number * factor for number in numbers)
            for numbers in (operand.counts, operand.displs)
        )
        count, total = operand.count * factor, operand.total * factor
        return replace(operand, dtype=dtype, count=count, total=total, counts=counts, displs=displs), (), at
    lengths = [block.layout.nbytes for block in operand.derived]
    if all(block.layout.is_run for block in operand.derived):
        starts = [block.address + block.layout.begin - operand.pointer for block in operand.derived]
        in_place = replace(operand, derived=None)
        return _in_elements(in_place, lengths, starts, dtype), (), at
    places, end = dict[Elements, int](), 0
    for block, nbytes in zip(operand.derived, lengths, strict=True):
        if block not in places:  # the same elements for several ranks are packed once
            places[block] = end
            end += nbytes
    starts = [places[block] for block in operand.derived]
    jobs = tuple(
        PackJob(block.address, block.layout, at + start) for block, start in places.items() if block.layout.regions
    )
    packed = _in_elements(replace(operand, pointer=at), lengths, starts, dtype)
    return packed, jobs, at + -(-end // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _strided(operand: Operand | None, dtype: np.dtype[Any]) -> tuple[Operand | None, list[Strides | None]]:
    """Return an operand whose blocks stay in place, and their gaps; the same operand if kernels need it packed."""
    if operand is None:
        return None, []
    none: list[Strides | None] = [None] * (1 if operand.counts is None else len(operand.counts))
    if operand.derived is None:
        return operand, none
    layouts = [block.layout for block in operand.derived]
    found = [None if layout.is_run else Strides.of(layout) for layout in layouts]
    if any(each is None and not layout.is_run for each, layout in zip(found, layouts, strict=True)):
        return operand, none
    firsts = [layout.regions[0].offset if layout.regions else 0 for layout in layouts]
    starts = [block.address + first - operand.pointer for block, first in zip(operand.derived, firsts, strict=True)]
    in_place = replace(operand, derived=None)
    return _in_elements(in_place, [layout.nbytes for layout in layouts], starts, dtype), found


def _in_elements(operand: Operand, lengths: Sequence[int], starts: Sequence[int], dtype: np.dtype[Any]) -> Operand:
    """Return an operand with blocks of ``lengths`` bytes, ``starts`` bytes from its pointer on, in elements."""
    if any(start % dtype.itemsize for start in starts):
        dtype = types.BYTE  # an extent need not be a multiple of the elements
    counts, displs = (tuple(number // dtype.itemsize for number in numbers) for numbers in (lengths, starts))
    total = sum(counts)
    if operand.counts is not None:
        return replace(operand, dtype=dtype, count=total, total=total, counts=counts, displs=displs)
    parts = operand.total // operand.count if operand.count else 1
    return replace(operand, pointer=operand.pointer + starts[0], dtype=dtype, count=total // parts, total=total)


@lru_cache(maxsize=256)
def table_for(layout: DatatypeLayout) -> PackTable:
    """Return the table of one element. The launch gets the addresses of memory and packed memory as arguments."""
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
    lists: dict[bytes, int] = {}
    """The lists behind the entries, by their offset in the table. Equal lists are stored once."""
    end_of_lists, entries, units = ENTRY_NBYTES * num_regions, list[bytes](), 0
    for job, fields in structures:
        element_units = sum(map(_run_units, fields))
        end = units + fields[0].runs * element_units
        # The kernel takes the last region that begins at or before a unit. So all fields except the first begin at the
        # end.
        begins = [units, *[end] * (len(fields) - 1)]
        for region, first_unit in zip(fields, begins, strict=True):
            for loop in region.loops:
                if loop.places and loop.places not in lists:
                    lists[loop.places] = end_of_lists
                    end_of_lists += len(loop.places)
            entries.append(_entry(region, first_unit, job, element_units, lists))
        units = end
    return PackTable(b"".join([*entries, *lists]), num_regions, units, len(structures))


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


def _entry(region: Region, first_unit: int, job: PackJob, element_units: int, lists: dict[bytes, int]) -> bytes:
    listed, found = LOOPS, 0
    counts, strides, packed_strides = [1] * LOOPS, [0] * LOOPS, [0] * LOOPS
    for place, loop in enumerate(reversed(region.loops)):
        counts[place], strides[place], packed_strides[place] = loop.rounds, loop.stride, loop.packed
        if loop.places:
            listed, found = place, lists[loop.places]
    return ENTRY.pack(
        *((job.memory + region.offset) % (1 << 64), job.packed + region.packed, first_unit, found),
        *(region.run_nbytes, _run_units(region), listed, element_units),
        *(*counts, *strides, *packed_strides),
    )
