"""The memory layout of derived datatypes, as few regions as possible, and their elements in device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.devices import memory_location
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.regions import Region, Regions, at_blocks, joined, packed_nbytes, repeated


# Layouts compare by identity, because keys of known calls hold layouts, and a comparison of regions takes long.
@dataclass(frozen=True, eq=False)
class DatatypeLayout:
    """The regions of an element, and MPI's extent of the element."""

    regions: Regions
    """The regions in the order of packed memory. Their runs fill it, in the order in which MPI packs them."""
    extent: int
    dtype: np.dtype[Any] | None
    """The type of all basic elements; None for several types, or types that NumPy lacks."""

    @cached_property
    def nbytes(self) -> int:
        """The bytes of the packed element."""
        return packed_nbytes(self.regions)

    @cached_property
    def begin(self) -> int:
        """The first byte that the element touches, from the address of the buffer on; 0 without bytes."""
        return min((region.ends[0] for region in self.regions), default=0)

    @cached_property
    def end(self) -> int:
        """The byte after the last byte that the element touches; 0 without bytes."""
        return max((region.ends[1] for region in self.regions), default=0)

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether the element is one run of bytes, or has none."""
        return not self.regions or (len(self.regions) == 1 and not self.regions[0].loops)

    def repeated(self, count: int) -> DatatypeLayout:
        """Return the layout of ``count`` elements that follow each other."""
        return self if count == 1 else _repeated(self, count)


@lru_cache(maxsize=1024)  # because a program repeats its calls
def _repeated(layout: DatatypeLayout, count: int) -> DatatypeLayout:
    return replace(layout, regions=repeated(layout.regions, count, layout.extent), extent=count * layout.extent)


def byte_run(nbytes: int) -> DatatypeLayout:
    """Return the layout of ``nbytes`` consecutive bytes."""
    return DatatypeLayout((Region(0, (), nbytes),) if nbytes else (), nbytes, None)


def concat(parts: Iterable[tuple[int, DatatypeLayout]]) -> DatatypeLayout:
    """Return the layout of parts, packed in this order. Each is a displacement in bytes and a layout."""
    return DatatypeLayout(joined(_in_packed_order((displ, part.regions) for displ, part in parts)), 0, None)


@dataclass(slots=True)
class DatatypeFacts:
    """What MPI says of a datatype, cached."""

    datatype: MPI.Datatype
    """The object, which lives as long as this, so that no other object gets its id."""
    handle: int
    """Its handle, which changes when the program frees it."""
    layout: DatatypeLayout | None
    """None only for DATATYPE_NULL.

    If other types also had None, ranks that name the same elements by different types would choose different carriers.
    """
    key: DatatypeLayout | int | None
    """The bytes of an element, if any number of elements is one run of bytes; else the layout."""
    predefined_nbytes: int | None
    """The bytes of an element of a predefined datatype without gaps; None for all others."""
    whole_pairs: DatatypeLayout | None = None
    """The layout in which pairs of MPI have their gaps; None if no call has needed it."""


known_facts: dict[int, DatatypeFacts] = {}
"""Facts by the id of the datatype's object. An MPI attribute would take three times as long, and handles are reused."""
_MOST_FACTS = 1024


def facts_of(datatype: MPI.Datatype) -> DatatypeFacts:
    """Return the facts of a datatype, from the cache or from MPI. Local."""
    kept = known_facts.get(id(datatype))
    if kept is not None and kept.handle == datatype.handle:
        return kept
    if len(known_facts) % 32 == 0:  # seldom, because it looks at all of them
        for number, each in known_facts.copy().items():
            if each.handle != each.datatype.handle:  # the program has freed it
                known_facts.pop(number, None)
        if len(known_facts) >= _MOST_FACTS:
            known_facts.clear()
    layout = layout_from_mpi(datatype)
    has_gaps = layout is None or not layout.is_contiguous or layout.begin or layout.nbytes != layout.extent
    key = layout if layout is None or has_gaps else layout.nbytes
    nbytes = key if type(key) is int and datatype.is_predefined else None
    kept = known_facts[id(datatype)] = DatatypeFacts(datatype, datatype.handle, layout, key, nbytes)
    return kept


def layout_of(datatype: MPI.Datatype) -> DatatypeLayout | None:
    """Return the layout of a datatype; None if `facts_of` has none. Local."""
    return facts_of(datatype).layout


def layout_from_mpi(datatype: MPI.Datatype) -> DatatypeLayout | None:
    """Return the layout of a datatype, uncached; None for DATATYPE_NULL. Local."""
    if not datatype.is_predefined:
        return derived_layout(datatype, layout_from_mpi)
    if datatype == MPI.DATATYPE_NULL:
        return None
    extent, dtype = datatype.extent, types.numpy_dtype(datatype)
    if datatype.Get_true_extent() != (0, datatype.size):  # a pair with a gap, such as SHORT_INT
        return DatatypeLayout(_measured_regions(datatype), extent, dtype)
    return replace(byte_run(datatype.size), extent=extent, dtype=dtype)


def derived_layout(datatype: MPI.Datatype, part: Callable[[MPI.Datatype], DatatypeLayout | None]) -> DatatypeLayout:
    """Return the layout of a derived datatype. ``part`` returns the layout of a datatype that it was made from."""
    base, combiner, parameters = datatype.decode()
    blocks = _RULES.get(combiner)
    bases = parameters.get("datatypes", [base])
    layouts = [part(each) for each in bases]
    for each in bases:
        if each != MPI.DATATYPE_NULL and not each.is_predefined:
            each.Free()  # decode() has made this handle
    parts = [layout for layout in layouts if layout is not None]
    basic = {each.dtype for each in parts if each.regions}
    # `_measured_regions` handles a DARRAY, or a type of an MPI that is newer than this table.
    regions = _measured_regions(datatype) if blocks is None else blocks(parts, parameters)
    return DatatypeLayout(regions, datatype.extent, basic.pop() if len(basic) == 1 else None)


def _in_packed_order(parts: Iterable[tuple[int, Regions]]) -> Iterator[Region]:
    """Yield the regions of parts, packed in this order. Each is a displacement in bytes and regions."""
    packed = 0
    for displ, regions in parts:
        for region in regions:
            yield region.moved(displ, packed)
        packed += packed_nbytes(regions)


def _vector(parts: Sequence[DatatypeLayout], parameters: dict[str, Any], *, unit: int | None = None) -> Regions:
    part = parts[0]
    block = repeated(part.regions, parameters["blocklength"], part.extent)
    return repeated(block, parameters["count"], parameters["stride"] * (part.extent if unit is None else unit))


def _indexed(parts: Sequence[DatatypeLayout], parameters: dict[str, Any], *, unit: int | None = None) -> Regions:
    part, displs = parts[0], parameters["displacements"]
    lengths = parameters.get("blocklengths") or [parameters.get("blocklength", 0)] * len(displs)
    return at_blocks(part.regions, part.extent, displs, lengths, part.extent if unit is None else unit)


def _struct(parts: Sequence[DatatypeLayout], parameters: dict[str, Any]) -> Regions:
    blocks = zip(parts, parameters["displacements"], parameters["blocklengths"], strict=True)
    return joined(
        _in_packed_order((displ, repeated(part.regions, count, part.extent)) for part, displ, count in blocks)
    )


def _subarray(parts: Sequence[DatatypeLayout], parameters: dict[str, Any]) -> Regions:
    part = parts[0]
    dimensions = list(zip(parameters["sizes"], parameters["subsizes"], parameters["starts"], strict=True))
    if parameters["order"] == MPI.ORDER_C:
        dimensions.reverse()
    regions, stride, offset = part.regions, part.extent, 0
    for size, subsize, start in dimensions:
        regions = repeated(regions, subsize, stride)
        offset += start * stride
        stride *= size
    return tuple(region.moved(offset, 0) for region in regions)


_RULES: dict[str, Callable[[Sequence[DatatypeLayout], dict[str, Any]], Regions]] = {
    "DUP": lambda parts, parameters: parts[0].regions,
    "RESIZED": lambda parts, parameters: parts[0].regions,
    "CONTIGUOUS": lambda parts, parameters: repeated(parts[0].regions, parameters["count"], parts[0].extent),
    "VECTOR": _vector,
    "HVECTOR": partial(_vector, unit=1),
    "INDEXED": _indexed,
    "HINDEXED": partial(_indexed, unit=1),
    "INDEXED_BLOCK": _indexed,
    "HINDEXED_BLOCK": partial(_indexed, unit=1),
    "STRUCT": _struct,
    "SUBARRAY": _subarray,
}
"""The regions of a derived datatype by its combiner: functions of the layouts of its parts and its parameters."""


def _measured_regions(datatype: MPI.Datatype) -> Regions:
    """Return the regions of one element of a datatype without a rule, in the order in which MPI packs them. Local.

    MPI packs the number of each byte, and so shows where the bytes lie. For a moment this takes as much host memory as
    the element spans.
    """
    if datatype.size == 0:
        return ()
    begin, nbytes = datatype.Get_true_extent()
    # The datatype need not be committed. mpi4py divides the memory by the extent to count the elements, so this copy
    # has the extent of the memory, and packs one element.
    alone = datatype.Create_resized(begin, nbytes).Commit()
    packed = np.empty(alone.Pack_size(1, MPI.COMM_SELF), np.uint8)
    displs = np.full(datatype.size, begin, np.int64)
    for digit in range((max(nbytes - 1, 1).bit_length() + 7) // 8):
        # One digit, to base 256, of each of the numbers from 0 to ``nbytes - 1``.
        digits = np.resize(np.repeat(np.arange(256, dtype=np.uint8), min(256**digit, nbytes)), nbytes)
        element = MPI.memory.fromaddress(digits.ctypes.data - begin, nbytes)
        end = alone.Pack(element, packed, 0, MPI.COMM_SELF)
        assert end == datatype.size, "MPI packs more than the elements"
        displs += packed[:end].astype(np.int64) << (8 * digit)
    alone.Free()
    return at_blocks(byte_run(1).regions, 1, displs.tolist(), [1] * len(displs), 1)


@dataclass(frozen=True)
class Elements:
    """Elements of a derived datatype: ``layout`` is the layout of all of them, from ``address`` on."""

    address: int
    layout: DatatypeLayout


def elements_at(
    datatype: MPI.Datatype, memory: tuple[int, int], displ: int, count: int, *, name: str, gpu: int | None = None
) -> Elements:
    """Return ``count`` elements, ``displ`` bytes after the begin of ``memory``. Local.

    ``memory`` is the address and the bytes of the argument ``name``. ``gpu`` is for MPI.BOTTOM, whose elements lie at
    any addresses of that GPU. Raises `InvalidUsageError` for elements that exceed the memory. Kernels need no committed
    datatype.
    """
    layout = layout_of(datatype)
    assert layout is not None, "DATATYPE_NULL"
    (pointer, nbytes), block = memory, layout.repeated(count)
    begin, end, address = displ + block.begin, displ + block.end, pointer + displ
    if gpu is None and block.regions and (begin < 0 or end > nbytes):
        raise InvalidUsageError(
            f"{name}: {count} elements of the datatype reach from byte {begin} to byte {end} of a buffer of "
            f"{nbytes} bytes: pass a larger buffer or another count"
        )
    ends = [region.ends for region in block.regions] if gpu is not None else []
    for at in (address + byte for first, after in ends for byte in (first, after - 1)):
        location = memory_location.locate(at)
        if location is None or location.managed or location.device != gpu:
            lies = "in no memory of a GPU" if location is None or location.managed else f"on GPU {location.device}"
            raise InvalidUsageError(
                f"{name}: MPI.BOTTOM with address {at:#x}, which lies {lies}, and another address on GPU {gpu}: let "
                "all elements lie in memory of one GPU, and none beyond its allocation"
            )
    return Elements(address, block)
