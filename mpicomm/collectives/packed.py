"""CallBlocks: the blocks of a call, some of which a kernel packs. The tables of that kernel.

MPI lets the ranks of a call use datatypes of different layout if they name the same basic elements. Packed memory holds
these elements one after the other. So all algorithms serve all datatypes, and ranks may pass plain arrays or derived
datatypes in one call. If each block of a buffer is contiguous, nothing is packed, and the buffer stays in place. It
also stays in place if `Gaps` describe its blocks and the kernel of the call moves such blocks. A rank sends the same
packets with gaps and without, so this need not be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, islice
from math import gcd
from operator import mul
from typing import NamedTuple

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels import packing
from mpicomm.kernels.team import PACKET_NBYTES
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Operand, Span
from mpicomm.mpi.layout import DatatypeLayout, Elements, byte_run, layout_of
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
        """Return the gaps of a layout that is not contiguous; None if kernels need it packed."""
        parts = [*islice((part for each in layout.regions for part in _without_lists(each)), _MOST_OF_BUFFER + 1)]
        if layout.nbytes >= _MOST_STRIDED_NBYTES or len(parts) > _MOST_OF_BUFFER:
            return None
        regions, packed, first = list[Strides](), 0, layout.regions[0].offset
        for part in parts:
            loops, rest = part.loops[::-1], packing.LOOPS - len(part.loops)
            steps = accumulate((loop.rounds for loop in loops), mul, initial=part.run_nbytes)
            if rest < 0 or part.packed != packed or any(loop.packed != next(steps) for loop in loops):
                return None  # in packed memory runs of other regions lie between these runs
            counts, strides = zip(*((loop.rounds, loop.stride) for loop in loops), *[(1, 0)] * rest, strict=True)
            regions.append(Strides(part.nbytes, part.run_nbytes, counts, part.offset - first, strides))
            packed += part.nbytes
        numbers = (number for each in regions for number in (each.run_nbytes, each.offset, *each.strides))
        return Gaps(gcd(PACKET_NBYTES, *numbers), tuple(regions))


@dataclass(frozen=True)
class PackJob:
    """Elements of a datatype at address ``memory``, and the offset of their packed memory."""

    memory: int
    layout: DatatypeLayout
    packed: int


Block = Span | Elements
"""A block of a buffer: plain bytes, or elements of a derived datatype."""


def blocks_of(operand: Operand, number: int) -> Sequence[Block]:
    """Return the first ``number`` blocks of an operand. Only one in device memory may have a derived datatype."""
    if operand.derived is None:
        assert operand.dtype is not None
        spans = (operand.block(index) for index in range(number))
        return [Span(span.pointer, span.count * operand.dtype.itemsize) for span in spans]
    if operand.counts is not None:
        return operand.derived
    assert operand.mpi_type is not None
    element = layout_of(operand.mpi_type)
    assert element is not None
    block = element.repeated(operand.count)
    return [Elements(operand.pointer + index * block.extent, block) for index in range(number)]


@dataclass(frozen=True)
class CallBlocks:
    """The blocks of the two buffers of a call, as engines move them: in bytes, or in elements if they are reduced.

    The blocks of a packed buffer, and results that an epilogue converts to another type, lie in scratch memory. Their
    pointers are offsets.
    """

    sends: Sequence[Span]
    receives: Sequence[Span]
    in_scratch: tuple[bool, bool] = (False, False)
    """Whether the blocks of each buffer lie in scratch memory."""
    nbytes: int = 0
    """The bytes of scratch memory."""
    before: tuple[PackJob, ...] = ()
    """The elements that are packed before the collective."""
    after: tuple[PackJob, ...] = ()
    """The elements that are unpacked after it."""
    gaps: tuple[Gaps | None, ...] = ()
    """The gaps in each block, first of the send buffer; empty if no block has gaps."""

    @classmethod
    def of(
        cls,
        sends: Sequence[Block],
        receives: Sequence[Block],
        *,
        packs_receives: bool,
        unpacks: bool,
        strided: bool,
    ) -> CallBlocks:
        """Return the blocks of a call that moves data. With ``strided`` a buffer stays in place if `Gaps` describe it.

        ``unpacks`` is whether this rank receives into its receive buffer. ``packs_receives`` is whether its input lies
        there.
        """
        sent, send_jobs, send_gaps, nbytes = _packed(sends, 0, strided=strided)
        received, receive_jobs, receive_gaps, nbytes = _packed(receives, nbytes, strided=strided)
        gaps = (*send_gaps, *receive_gaps)
        return cls(
            sent,
            received,
            in_scratch=(bool(send_jobs), bool(receive_jobs)),
            nbytes=nbytes,
            before=(*send_jobs, *receive_jobs) if packs_receives else send_jobs,
            after=receive_jobs if unpacks else (),
            gaps=gaps if any(gaps) else (),
        )

    def at(self, scratch: int) -> list[list[Span]]:
        """Return the blocks of each buffer, with addresses in the scratch memory at ``scratch``."""
        return [
            [Span(span.pointer + scratch, span.count) for span in spans] if in_scratch else [*spans]
            for spans, in_scratch in zip((self.sends, self.receives), self.in_scratch, strict=True)
        ]

    def launches(self, backend: GpuBackend, scratch: int) -> tuple[list[Launch], list[Launch]]:
        """Return the launches that pack before the collective, and those that unpack after it. Local."""
        before = pack_launches(backend, self.before, scratch, unpacks=False)
        return before, pack_launches(backend, self.after, scratch, unpacks=True)


def _packed(
    blocks: Sequence[Block], begin: int, *, strided: bool
) -> tuple[Sequence[Span], tuple[PackJob, ...], Sequence[Gaps | None], int]:
    """Return the blocks of a buffer in bytes, the jobs that pack it, its gaps, and the end of its packed memory.

    The jobs pack it into scratch memory from offset ``begin`` on. Without jobs it stays in place, and may have gaps if
    ``strided``.
    """
    elements = [block for block in blocks if isinstance(block, Elements)]
    if not elements:
        contiguous = [block for block in blocks if isinstance(block, Span)]
        return contiguous, (), [None] * len(contiguous), begin
    layouts = [each.layout for each in elements]
    gaps = [None if layout.is_contiguous or not strided else Gaps.of(layout) for layout in layouts]
    described = all(each or layout.is_contiguous for each, layout in zip(gaps, layouts, strict=True))
    if described and sum(len(each.regions) for each in {*gaps} if each) <= _MOST_OF_BUFFER:
        firsts = [layout.regions[0].offset if layout.regions else 0 for layout in layouts]
        starts = (each.address + first for each, first in zip(elements, firsts, strict=True))
        return [Span(start, layout.nbytes) for start, layout in zip(starts, layouts, strict=True)], (), gaps, begin
    offsets, end = dict[Elements, int](), begin
    for each in elements:
        if each not in offsets:  # the same elements for several ranks are packed once
            offsets[each] = end
            end += each.layout.nbytes
    jobs = tuple(PackJob(each.address, each.layout, offset) for each, offset in offsets.items() if each.layout.regions)
    spans = [Span(offsets[each], each.layout.nbytes) for each in elements]
    return spans, jobs, [None] * len(spans), -(-end // _ALIGNED_NBYTES) * _ALIGNED_NBYTES


def _without_lists(region: Region) -> Iterator[Region]:
    """Yield a region, or the rounds of its loops from the outermost loop to the loop with a list."""
    if not any(loop.displs for loop in region.loops):
        yield region
    else:
        for number in range(region.loops[0].rounds):
            yield from _without_lists(rounds_of(region, number, number + 1))


def pack_launches(backend: GpuBackend, jobs: Sequence[PackJob], packed: int, *, unpacks: bool) -> list[Launch]:
    """Return the launch for all ``jobs``; their packed memory begins at ``packed``. No launch for no bytes. Local."""
    table = table_of_jobs(jobs)
    return [pack_launch(backend, table, 0, packed, unpacks=unpacks)] if table.units else []


def pack_launch(backend: GpuBackend, table: packing.PackTable, memory: int, packed: int, *, unpacks: bool) -> Launch:
    """Return the launch for a table. Its regions begin at ``memory``, its packed memory begins at ``packed``. Local."""
    arguments = table.arguments(backend.pack_table(table), memory, packed, backend.faults.failed, unpacks=unpacks)
    blocks = packing.blocks_for(table.units, backend.multiprocessors)
    return Launch(packing.PACK_KERNEL, arguments, blocks=blocks, threads=packing.PACK_THREADS)


@lru_cache(maxsize=256)
def table_of_element(layout: DatatypeLayout) -> packing.PackTable:
    """Return the table of one element. The launch gets the addresses of its memory and packed memory. Local."""
    return table_of_jobs([PackJob(0, layout, 0)])


def table_of_blocks(displs: Sequence[int], nbytes: Sequence[int]) -> packing.PackTable:
    """Return the table of blocks with these displacements and bytes, which are packed one after the other. Local."""
    return table_of_jobs([PackJob(0, DatatypeLayout(at_blocks(byte_run(1).regions, 1, displs, nbytes, 1), 0, None), 0)])


def table_of_jobs(jobs: Iterable[PackJob]) -> packing.PackTable:
    """Return the table that packs or unpacks all of ``jobs`` in one launch. Local."""
    structures = [
        (job, fields)
        for job in jobs
        for fields in _structures(part for each in job.layout.regions for part in _parts(each))
    ]
    num_regions = sum(len(fields) for _, fields in structures)
    lists: dict[bytes, int] = {}
    """The offset of each list in the table, after the entries. Equal lists are stored once."""
    end_of_lists, entries, units = packing.ENTRY_NBYTES * num_regions, list[bytes](), 0
    for job, fields in structures:
        element_units = sum(map(_run_units, fields))
        end = units + fields[0].runs * element_units
        # The kernel takes the last region that begins at or before a unit. So all fields except the first begin at the
        # end.
        begins = [units, *[end] * (len(fields) - 1)]
        for region, first_unit in zip(fields, begins, strict=True):
            for loop in region.loops:
                if loop.displs and loop.displs not in lists:
                    lists[loop.displs] = end_of_lists
                    end_of_lists += len(loop.displs)
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
    listed, list_offset = packing.LOOPS, 0
    counts, strides, packed_strides = [1] * packing.LOOPS, [0] * packing.LOOPS, [0] * packing.LOOPS
    for place, loop in enumerate(reversed(region.loops)):
        counts[place], strides[place], packed_strides[place] = loop.rounds, loop.stride, loop.packed
        if loop.displs:
            listed, list_offset = place, lists[loop.displs]
    return packing.ENTRY.pack(
        *((job.memory + region.offset) % (1 << 64), job.packed + region.packed, first_unit, list_offset),
        *(region.run_nbytes, _run_units(region), listed, element_units),
        *(*counts, *strides, *packed_strides),
    )
