"""Derived datatypes on GPUs: a collective on packed memory, and the tables of the kernel that packs and unpacks.

MPI lets the ranks of a call use datatypes of different layout if they name the same basic elements. Packed memory holds
these elements one after the other. So all algorithms serve all datatypes, and ranks with plain arrays can meet ranks
with derived datatypes. If each block of a buffer is one run of bytes, nothing is packed, and the buffer stays in place.
It also stays in place if `Gaps` describe its blocks and the kernel of the call moves such blocks. A rank sends the same
packets with gaps and without, so this need not be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from math import gcd
from operator import mul
from typing import Any, NamedTuple

import numpy as np

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels import packing
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.kernels.variant import Launch
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.layout import DatatypeLayout, Elements, layout_of, run_of
from mpicomm.mpi.regions import Region, at_blocks, rounds_of

_ALIGNED_NBYTES = 256
_MOST_UNITS = 1 << 31  # the kernel counts the units of a region in 32 bits
_MOST_RUN_NBYTES = 1 << 30
_MOST_STRIDED_NBYTES = 1 << 32
MOST_STRIDES = 52
"""The most `Strides` of a call: ``kMostStrides`` in strided.cuh."""
_MOST_OF_BUFFER = MOST_STRIDES // 2
_MOST_FIELDS = 16  # a thread passes all fields before its own


class Strides(NamedTuple):
    """Nested loops that visit runs of bytes in their order in a block."""

    nbytes: int
    run_nbytes: int
    counts: tuple[int, ...]
    """The innermost loop first; 1 for a loop that does not exist."""
    offset: int
    """The bytes from the first run of the block to the first run of these loops."""
    strides: tuple[int, ...]


class Gaps(NamedTuple):
    """The gaps in a block. Kernels move such a block without packing it."""

    grain: int
    """A power of two up to `PACKET_NBYTES`, which divides all runs, strides and offsets."""
    regions: tuple[Strides, ...]
    """The loops, one after the other."""

    @staticmethod
    @lru_cache(maxsize=1024)  # because a program repeats its calls
    def of(layout: DatatypeLayout) -> Gaps | None:
        """Return the gaps of a layout that is not one run; None if kernels need it packed."""
        parts = [*islice((part for each in layout.regions for part in _without_lists(each)), _MOST_OF_BUFFER + 1)]
        if layout.nbytes >= _MOST_STRIDED_NBYTES or len(parts) > _MOST_OF_BUFFER:
            return None
        regions, packed, first = list[Strides](), 0, layout.regions[0].offset
        for part in parts:
            loops, rest = part.loops[::-1], packing.LOOPS - len(part.loops)
            steps = accumulate((loop.rounds for loop in loops), mul, initial=part.run_nbytes)
            if rest < 0 or part.packed != packed or any(loop.packed != next(steps) for loop in loops):
                return None  # runs of other regions lie between these runs in packed memory
            counts, strides = zip(*((loop.rounds, loop.stride) for loop in loops), *[(1, 0)] * rest, strict=True)
            regions.append(Strides(part.nbytes, part.run_nbytes, counts, part.offset - first, strides))
            packed += part.nbytes
        numbers = (number for each in regions for number in (each.run_nbytes, each.offset, *each.strides))
        return Gaps(gcd(PACKET_NBYTES, *numbers), tuple(regions))


@dataclass(frozen=True)
class PackJob:
    """Elements of a datatype at address ``memory``, and their place in packed memory."""

    memory: int
    layout: DatatypeLayout
    packed: int


@dataclass(frozen=True)
class Packed:
    """The buffers of a call. Buffers that are packed lie in scratch memory; their pointers are offsets."""

    send: Operand | None
    receive: Operand | None
    nbytes: int
    """The bytes of scratch memory."""
    before: tuple[PackJob, ...]
    """The elements that are packed before the collective."""
    after: tuple[PackJob, ...]
    """The elements that are unpacked after it."""
    gaps: tuple[tuple[Gaps | None, ...], ...]
    """The gaps in the blocks of each buffer that stays in place, in the order of the blocks; empty without gaps."""

    @classmethod
    def of(
        cls,
        send: Operand | None,
        receive: Operand | None,
        *,
        input_in_receive: bool,
        receives: bool,
        as_bytes: bool,
        strided: bool,
    ) -> Packed | None:
        """Return the call on packed memory; None if no buffer has a derived datatype.

        With ``strided`` a buffer stays in place if `Gaps` describe its blocks.

        ``input_in_receive`` is whether this rank's input lies in its receive buffer. ``receives`` is whether this rank
        receives into that buffer. ``as_bytes`` is for calls in which each pair of ranks may use other types.
        """
        given = [operand for operand in (send, receive) if operand is not None]
        if not any(operand.derived for operand in given):
            return None
        dtype = types.BYTE if as_bytes else _common_dtype(given)
        packed_send, sent, of_send, nbytes = _pack(send, dtype, 0, strided=strided)
        packed_receive, received, of_receive, nbytes = _pack(receive, dtype, nbytes, strided=strided)
        before = (*sent, *(received if input_in_receive else ()))
        after = received if receives else ()
        return cls(packed_send, packed_receive, nbytes, before, after, (of_send, of_receive))

    def placed(self, scratch: int) -> tuple[Operand | None, Operand | None]:
        """Return the buffers. Packed buffers get addresses in the memory at ``scratch``."""
        send, receive = (
            operand
            if operand is None or operand.derived is None
            else replace(operand, pointer=operand.pointer + scratch)
            for operand in (self.send, self.receive)
        )
        return send, receive

    def launches(self, backend: GpuBackend, scratch: int) -> tuple[list[Launch], list[Launch]]:
        """Return the launches that pack before the collective, and those that unpack after it. Local."""
        before = pack_launches(backend, self.before, scratch, unpacks=False)
        return before, pack_launches(backend, self.after, scratch, unpacks=True)


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


def _pack(
    operand: Operand | None, dtype: np.dtype[Any], at: int, *, strided: bool
) -> tuple[Operand | None, tuple[PackJob, ...], tuple[Gaps | None, ...], int]:
    """Return an operand in elements of ``dtype``, the jobs that pack it, its gaps, and the offset behind packed memory.

    The jobs pack it from offset ``at`` on. It has gaps only if it stays in place with ``strided``.
    """
    if operand is None:
        return None, (), (), at
    if operand.derived is None:
        assert operand.dtype is not None
        factor = operand.dtype.itemsize // dtype.itemsize
        counts, displs = (
            None if numbers is None else tuple(number * factor for number in numbers)
            for numbers in (operand.counts, operand.displs)
        )
        count, total = operand.count * factor, operand.total * factor
        return replace(operand, dtype=dtype, count=count, total=total, counts=counts, displs=displs), (), (), at
    lengths = [block.layout.nbytes for block in operand.derived]
    if all(block.layout.is_run for block in operand.derived):
        starts = [block.address + block.layout.begin - operand.pointer for block in operand.derived]
        return _in_elements(operand, lengths, starts, dtype), (), (), at
    in_place = _strided(operand, operand.derived, dtype) if strided else None
    if in_place is not None:
        return in_place[0], (), in_place[1], at
    places, end = dict[Elements, int](), 0
    for block, nbytes in zip(operand.derived, lengths, strict=True):
        if block not in places:  # the same elements for several ranks are packed once
            places[block] = end
            end += nbytes
    starts = [places[block] for block in operand.derived]
    jobs = tuple(
        PackJob(block.address, block.layout, at + start) for block, start in places.items() if block.layout.regions
    )
    packed = replace(_in_elements(replace(operand, pointer=at), lengths, starts, dtype), derived=operand.derived)
    return packed, jobs, (), at + -(-end // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _strided(
    operand: Operand, blocks: Sequence[Elements], dtype: np.dtype[Any]
) -> tuple[Operand, tuple[Gaps | None, ...]] | None:
    """Return an operand whose ``blocks`` stay in place, and their gaps; None if kernels need it packed."""
    counts = operand.counts
    if counts is None and operand.total > operand.count > 0:  # equal blocks, which one layout describes up to here
        assert operand.mpi_type is not None
        element = layout_of(operand.mpi_type)
        assert element is not None
        block, counts = element.repeated(operand.count), (operand.count,) * (operand.total // operand.count)
        blocks = [Elements(operand.pointer + number * block.extent, block) for number in range(len(counts))]
    layouts = [block.layout for block in blocks]
    gaps = tuple(None if layout.is_run else Gaps.of(layout) for layout in layouts)
    described = all(each or layout.is_run for each, layout in zip(gaps, layouts, strict=True))
    if not described or sum(len(each.regions) for each in {*gaps} if each) > _MOST_OF_BUFFER:
        return None
    firsts = [layout.regions[0].offset if layout.regions else 0 for layout in layouts]
    starts = [block.address + first - operand.pointer for block, first in zip(blocks, firsts, strict=True)]
    in_place = _in_elements(replace(operand, counts=counts), [layout.nbytes for layout in layouts], starts, dtype)
    if operand.counts is None:  # a count is the count of one block
        in_place = replace(in_place, count=in_place.total // len(blocks))
    return in_place, gaps if any(gaps) else ()


def _without_lists(region: Region) -> Iterator[Region]:
    """Yield a region, or the rounds of its loops from the outermost loop to the loop with a list."""
    if not any(loop.places for loop in region.loops):
        yield region
    else:
        for number in range(region.loops[0].rounds):
            yield from _without_lists(rounds_of(region, number, number + 1))


def _in_elements(operand: Operand, lengths: Sequence[int], starts: Sequence[int], dtype: np.dtype[Any]) -> Operand:
    """Return an operand with blocks of ``lengths`` bytes, ``starts`` bytes from its pointer on, in plain elements."""
    if any(start % dtype.itemsize for start in starts):
        dtype = types.BYTE  # an extent need not be a multiple of the elements
    counts, displs = (tuple(number // dtype.itemsize for number in numbers) for numbers in (lengths, starts))
    total = sum(counts)
    if operand.counts is not None:
        return replace(operand, dtype=dtype, count=total, total=total, counts=counts, displs=displs, derived=None)
    parts = operand.total // operand.count if operand.count else 1
    first, count = operand.pointer + starts[0], total // parts
    return replace(operand, pointer=first, dtype=dtype, count=count, total=total, derived=None)


def pack_launches(backend: GpuBackend, jobs: Sequence[PackJob], packed: int, *, unpacks: bool) -> list[Launch]:
    """Return the launch for all ``jobs``; their packed memory begins at ``packed``. No launch for no bytes. Local."""
    table = table_of(jobs)
    return [pack_launch(backend, table, 0, packed, unpacks=unpacks)] if table.units else []


def pack_launch(backend: GpuBackend, table: packing.PackTable, memory: int, packed: int, *, unpacks: bool) -> Launch:
    """Return the launch for a table. Its regions begin at ``memory``, its packed memory begins at ``packed``. Local."""
    arguments = table.arguments(backend.pack_table(table), memory, packed, backend.faults.failed, unpacks=unpacks)
    blocks = packing.blocks_for(table.units, backend.multiprocessors)
    return Launch(packing.PACK_KERNEL, arguments, blocks=blocks, threads=packing.PACK_THREADS)


@lru_cache(maxsize=256)
def table_for(layout: DatatypeLayout) -> packing.PackTable:
    """Return the table of one element. The launch gets the addresses of memory and packed memory as arguments."""
    return table_of([PackJob(0, layout, 0)])


def table_of_blocks(displs: Sequence[int], nbytes: Sequence[int]) -> packing.PackTable:
    """Return the table of blocks with these displacements and bytes, which are packed one after the other. Local."""
    return table_of([PackJob(0, DatatypeLayout(at_blocks(run_of(1).regions, 1, displs, nbytes, 1), 0, None), 0)])


def table_of(jobs: Iterable[PackJob]) -> packing.PackTable:
    """Return the table that packs or unpacks all of ``jobs`` in one launch. Local."""
    structures = [
        (job, fields)
        for job in jobs
        for fields in _structures(part for each in job.layout.regions for part in _parts(each))
    ]
    num_regions = sum(len(fields) for _, fields in structures)
    lists: dict[bytes, int] = {}
    """The lists behind the entries, by their offset in the table. Equal lists are stored once."""
    end_of_lists, entries, units = packing.ENTRY_NBYTES * num_regions, list[bytes](), 0
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
    return packing.PackTable(b"".join([*entries, *lists]), num_regions, units, len(structures))


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
    return -(-region.run_nbytes // PACKET_NBYTES)


def _parts(region: Region) -> Iterator[Region]:
    """Cut a region into regions that the kernel can address, in the same order."""
    fits = region.run_nbytes <= _MOST_RUN_NBYTES
    if len(region.loops) <= packing.LOOPS and region.runs * _run_units(region) < _MOST_UNITS and fits:
        yield region
    elif not region.loops:
        for start in range(0, region.run_nbytes, _MOST_RUN_NBYTES):
            yield replace(region.moved(start, start), run_nbytes=min(_MOST_RUN_NBYTES, region.run_nbytes - start))
    else:
        rounds = region.loops[0].rounds
        step = 1 if len(region.loops) > packing.LOOPS or not fits else -(-rounds // 2)
        for start in range(0, rounds, step):
            yield from _parts(rounds_of(region, start, min(start + step, rounds)))


def _entry(region: Region, first_unit: int, job: PackJob, element_units: int, lists: dict[bytes, int]) -> bytes:
    listed, found = packing.LOOPS, 0
    counts, strides, packed_strides = [1] * packing.LOOPS, [0] * packing.LOOPS, [0] * packing.LOOPS
    for place, loop in enumerate(reversed(region.loops)):
        counts[place], strides[place], packed_strides[place] = loop.rounds, loop.stride, loop.packed
        if loop.places:
            listed, found = place, lists[loop.places]
    return packing.ENTRY.pack(
        *((job.memory + region.offset) % (1 << 64), job.packed + region.packed, first_unit, found),
        *(region.run_nbytes, _run_units(region), listed, element_units),
        *(*counts, *strides, *packed_strides),
    )
