"""The memory layout of MPI's derived datatypes, in the normal form that the kernel of pack.cu reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.mpi import types

_MOST_REPEATS = 64


@dataclass(frozen=True)
class Region:
    """Runs of consecutive bytes at the places that nested loops visit."""

    offset: int
    """Bytes from the address of the buffer to the first run; it may be negative."""
    loops: tuple[tuple[int, int], ...]
    """The count, 2 or more, and the stride in bytes of each loop; the outermost loop first."""
    run_nbytes: int

    @property
    def nbytes(self) -> int:
        """The bytes of all runs."""
        return self.run_nbytes * math.prod(count for count, _ in self.loops)

    def moved(self, offset: int) -> Region:
        """Return the region ``offset`` bytes farther on."""
        return Region(self.offset + offset, self.loops, self.run_nbytes)


# Compared by identity, because keys of known calls hold layouts, and a comparison of regions takes long.
@dataclass(frozen=True, eq=False)
class Layout:
    """The regions of an element in the order in which MPI packs them, and MPI's extent of the element."""

    regions: tuple[Region, ...]
    extent: int
    dtype: np.dtype[Any] | None
    """The type of all basic elements; None where there are several types, or types that NumPy lacks."""

    @cached_property
    def nbytes(self) -> int:
        """The packed bytes."""
        return sum(region.nbytes for region in self.regions)

    @cached_property
    def begin(self) -> int:
        """The first byte that the element touches, from the address of the buffer on; 0 without bytes."""
        return min((ends_of(region)[0] for region in self.regions), default=0)

    @cached_property
    def end(self) -> int:
        """The byte behind the last one that the element touches; 0 without bytes."""
        return max((ends_of(region)[1] for region in self.regions), default=0)

    def repeated(self, count: int) -> Layout:
        """Return the layout of ``count`` elements that follow each other."""
        if count == 1:
            return self
        found = self._repeats.get(count)
        if found is None:
            if len(self._repeats) >= _MOST_REPEATS:
                self._repeats.clear()
            regions = _repeated(self.regions, count, self.extent)
            found = self._repeats[count] = replace(self, regions=regions, extent=count * self.extent)
        return found

    @cached_property
    def _repeats(self) -> dict[int, Layout]:
        """Layouts that `repeated` has made, because a program repeats its calls."""
        return {}


def run_of(nbytes: int) -> Layout:
    """Return the layout of ``nbytes`` consecutive bytes."""
    return Layout((Region(0, (), nbytes),) if nbytes else (), nbytes, None)


def together(parts: Iterable[tuple[int, Layout]]) -> Layout:
    """Return the layout of parts that are packed one after the other. Each is a displacement in bytes and a layout."""
    regions = _joined(region.moved(displ) for displ, part in parts for region in part.regions)
    return Layout(regions, 0, None)


@dataclass
class Known:
    """What was found out about a datatype."""

    layout: Layout | None
    """None for a datatype with a part that only MPI knows, such as a DARRAY."""
    committed: bool
    """False also where nobody has asked MPI."""


def known_of(datatype: MPI.Datatype) -> Known:
    """Return what is known of a datatype. Local.

    The layout is made once per datatype, and MPI drops all with the datatype.
    """
    if datatype.is_predefined:
        return Known(_decoded(datatype), True)
    key = _key()
    known: Any = datatype.Get_attr(key)
    if known is None:
        known = Known(_decoded(datatype), False)
        datatype.Set_attr(key, known)
    assert isinstance(known, Known)
    return known


def layout_of(datatype: MPI.Datatype) -> Layout | None:
    """Return the layout of a datatype; None where `known_of` knows none. Local."""
    return known_of(datatype).layout


_keys: list[int] = []


def _key() -> int:
    if not _keys:
        _keys.append(MPI.Datatype.Create_keyval())
    return _keys[0]


def _decoded(datatype: MPI.Datatype) -> Layout | None:
    if datatype == MPI.DATATYPE_NULL:
        return None
    extent = datatype.extent
    dtype = types.numpy_dtype(datatype) if datatype.is_predefined else None
    if datatype.is_predefined:
        if datatype.Get_true_extent() != (0, datatype.size):
            return None  # a pair with a gap, such as DOUBLE_INT
        return Layout((Region(0, (), datatype.size),) if datatype.size else (), extent, dtype)
    base, combiner, parameters = datatype.decode()
    blocks = _BLOCKS.get(combiner)
    bases = parameters.get("datatypes", [base])
    layouts = [] if blocks is None else [layout_of(each) for each in bases]
    for each in bases:
        if each != MPI.DATATYPE_NULL and not each.is_predefined:
            each.Free()  # MPI has made a handle for the question
    if blocks is None:
        return None
    parts = [layout for layout in layouts if layout is not None]
    if len(parts) < len(layouts):
        return None
    basic = {part.dtype for part in parts if part.regions}
    regions = blocks(parts, parameters)
    return Layout(regions, extent, basic.pop() if len(basic) == 1 else None)


Regions = tuple[Region, ...]


def ends_of(region: Region) -> tuple[int, int]:
    """Return the first byte that a region touches and the byte behind the last, from the address of the buffer on."""
    reaches = [(count - 1) * stride for count, stride in region.loops]
    first = region.offset + sum(reach for reach in reaches if reach < 0)
    return first, region.offset + sum(reach for reach in reaches if reach > 0) + region.run_nbytes


def _looped(region: Region, count: int, stride: int) -> Region:
    """Return ``count`` copies of a region as one region, with as few loops as possible."""
    if count == 1:
        return region
    if not region.loops and stride == region.run_nbytes:
        return Region(region.offset, (), region.run_nbytes * count)
    if region.loops and region.loops[0][0] * region.loops[0][1] == stride:  # the loop goes on where it ends
        (inner, step), *rest = region.loops
        return Region(region.offset, ((inner * count, step), *rest), region.run_nbytes)
    return Region(region.offset, ((count, stride), *region.loops), region.run_nbytes)


def _repeated(regions: Regions, count: int, stride: int) -> Regions:
    if count == 0 or not regions:
        return ()
    if len(regions) == 1:
        return (_looped(regions[0], count, stride),)
    return _joined(region.moved(number * stride) for number in range(count) for region in regions)


def _joined(regions: Iterable[Region]) -> Regions:
    """Join neighbouring regions to runs and loops, where they are that."""
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else None
        if last is not None and not last.loops and not region.loops and last.offset + last.run_nbytes == region.offset:
            joined[-1] = Region(last.offset, (), last.run_nbytes + region.run_nbytes)
        else:
            joined.append(region)
    looped: list[Region] = []
    for region in joined:
        last = looped[-1] if looped else None
        if last is not None and last.run_nbytes == region.run_nbytes:
            if last.loops == region.loops and region.offset != last.offset:
                looped[-1] = _looped(last, 2, region.offset - last.offset)
                continue
            if last.loops and last.loops[1:] == region.loops:
                count, stride = last.loops[0]
                if region.offset == last.offset + count * stride:
                    looped[-1] = Region(last.offset, ((count + 1, stride), *region.loops), region.run_nbytes)
                    continue
        looped.append(region)
    return tuple(looped)


def _at(part: Layout, blocks: Iterable[tuple[int, int]]) -> Regions:
    """Return blocks of elements; each block is a displacement in bytes and a count."""
    return _joined(
        region.moved(displ) for displ, count in blocks for region in _repeated(part.regions, count, part.extent)
    )


def _dup(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    return parts[0].regions


def _contiguous(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    return _repeated(parts[0].regions, parameters["count"], parts[0].extent)


def _vector(parts: Sequence[Layout], parameters: dict[str, Any], *, unit: int | None = None) -> Regions:
    part = parts[0]
    block = _repeated(part.regions, parameters["blocklength"], part.extent)
    return _repeated(block, parameters["count"], parameters["stride"] * (part.extent if unit is None else unit))


def _hvector(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    return _vector(parts, parameters, unit=1)


def _indexed(parts: Sequence[Layout], parameters: dict[str, Any], *, unit: int | None = None) -> Regions:
    part, displs = parts[0], parameters["displacements"]
    lengths = parameters.get("blocklengths") or [parameters.get("blocklength", 0)] * len(displs)
    unit = part.extent if unit is None else unit
    return _at(part, ((displ * unit, length) for displ, length in zip(displs, lengths, strict=True)))


def _hindexed(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    return _indexed(parts, parameters, unit=1)


def _struct(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    blocks = zip(parts, parameters["displacements"], parameters["blocklengths"], strict=True)
    return _joined(region for part, displ, count in blocks for region in _at(part, [(displ, count)]))


def _subarray(parts: Sequence[Layout], parameters: dict[str, Any]) -> Regions:
    part = parts[0]
    dimensions = list(zip(parameters["sizes"], parameters["subsizes"], parameters["starts"], strict=True))
    if parameters["order"] == MPI.ORDER_C:
        dimensions.reverse()
    regions, stride, offset = part.regions, part.extent, 0
    for size, subsize, start in dimensions:
        regions = _repeated(regions, subsize, stride)
        offset += start * stride
        stride *= size
    return tuple(region.moved(offset) for region in regions)


_BLOCKS: dict[str, Callable[[Sequence[Layout], dict[str, Any]], Regions]] = {
    "DUP": _dup,
    "RESIZED": _dup,
    "CONTIGUOUS": _contiguous,
    "VECTOR": _vector,
    "HVECTOR": _hvector,
    "INDEXED": _indexed,
    "HINDEXED": _hindexed,
    "INDEXED_BLOCK": _indexed,
    "HINDEXED_BLOCK": _hindexed,
    "STRUCT": _struct,
    "SUBARRAY": _subarray,
}
"""By MPI's combiner: the regions of a datatype made from others."""
