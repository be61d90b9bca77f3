"""The memory layout of derived datatypes, as few regions as possible, and their elements in device memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.devices import memory_location
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.regions import Region, Regions, at_blocks, joined, packed_nbytes, repeated, rounds_of

_MOST_REPEATS = 64


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
    def is_run(self) -> bool:
        """Whether the element is one run of bytes, or has no bytes."""
        return not self.regions or (len(self.regions) == 1 and not self.regions[0].loops)

    def repeated(self, count: int) -> DatatypeLayout:
        """Return the layout of ``count`` elements that follow each other."""
        if count == 1:
            return self
        found = self._repeats.get(count)
        if found is None:
            if len(self._repeats) >= _MOST_REPEATS:
                self._repeats.clear()
            regions = repeated(self.regions, count, self.extent)
            found = self._repeats[count] = replace(self, regions=regions, extent=count * self.extent)
        return found

    @cached_property
    def _repeats(self) -> dict[int, DatatypeLayout]:
        """The layouts that `repeated` has made, because a program repeats its calls."""
        return {}


def run_of(nbytes: int) -> DatatypeLayout:
    """Return the layout of ``nbytes`` consecutive bytes."""
    return DatatypeLayout((Region(0, (), nbytes),) if nbytes else (), nbytes, None)


def together(parts: Iterable[tuple[int, DatatypeLayout]]) -> DatatypeLayout:
    """Return the layout of parts that are packed one after the other. Each is a displacement in bytes and a layout."""
    return DatatypeLayout(joined(_in_turn((displ, part.regions) for displ, part in parts)), 0, None)


@dataclass
class Known:
    """The layout of a datatype, and whether MPI has said that the datatype is committed."""

    layout: DatatypeLayout | None
    """None only for DATATYPE_NULL.

    If other types also had None, ranks that name the same elements by different types would take different ways.
    """
    committed: bool
    """False also if no call has asked MPI yet."""
    whole_pairs: DatatypeLayout | None = None
    """The layout in which pairs of MPI have their gaps; None if no call has needed it."""
    key: Hashable = None
    """By which known calls recognise the datatype, see `plain_arrays`; None before the first such call."""


def known_of(datatype: MPI.Datatype) -> Known:
    """Return the layout of a datatype, and whether it is committed. Local.

    It makes the layout once per datatype, and MPI drops the layout with the datatype.
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


def layout_of(datatype: MPI.Datatype) -> DatatypeLayout | None:
    """Return the layout of a datatype; None if `known_of` has none. Local."""
    return known_of(datatype).layout


_keys: list[int] = []


def _key() -> int:
    if not _keys:
        _keys.append(MPI.Datatype.Create_keyval())
    return _keys[0]


def _decoded(datatype: MPI.Datatype) -> DatatypeLayout | None:
    if not datatype.is_predefined:
        return made_of(datatype, layout_of)
    if datatype == MPI.DATATYPE_NULL:
        return None
    extent = datatype.extent
    dtype = types.numpy_dtype(datatype)
    if datatype.Get_true_extent() != (0, datatype.size):  # a pair with a gap, such as SHORT_INT
        return DatatypeLayout(_measured_regions(datatype), extent, dtype)
    return DatatypeLayout((Region(0, (), datatype.size),) if datatype.size else (), extent, dtype)


def made_of(datatype: MPI.Datatype, part: Callable[[MPI.Datatype], DatatypeLayout | None]) -> DatatypeLayout:
    """Return the layout of a derived datatype. ``part`` returns the layout of a datatype from which it was made."""
    base, combiner, parameters = datatype.decode()
    blocks = _BLOCKS.get(combiner)
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


def _in_turn(parts: Iterable[tuple[int, Regions]]) -> Iterator[Region]:
    """Yield the regions of parts that are packed one after the other. Each is a displacement in bytes and regions."""
    packed = 0
    for displ, regions in parts:
        for region in regions:
            yield region.moved(displ, packed)
        packed += packed_nbytes(regions)


def _dup(parts: Sequence[DatatypeLayout], parameters: dict[str, Any]) -> Regions:
    return parts[0].regions


def _contiguous(parts: Sequence[DatatypeLayout], parameters: dict[str, Any]) -> Regions:
    return repeated(parts[0].regions, parameters["count"], parts[0].extent)


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
    return joined(_in_turn((displ, repeated(part.regions, count, part.extent)) for part, displ, count in blocks))


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


_BLOCKS: dict[str, Callable[[Sequence[DatatypeLayout], dict[str, Any]], Regions]] = {
    "DUP": _dup,
    "RESIZED": _dup,
    "CONTIGUOUS": _contiguous,
    "VECTOR": _vector,
    "HVECTOR": partial(_vector, unit=1),
    "INDEXED": _indexed,
    "HINDEXED": partial(_indexed, unit=1),
    "INDEXED_BLOCK": _indexed,
    "HINDEXED_BLOCK": partial(_indexed, unit=1),
    "STRUCT": _struct,
    "SUBARRAY": _subarray,
}
"""For each combiner of MPI, a function that returns the regions of a datatype made from others."""


_BYTE = (Region(0, (), 1),)


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
    try:
        places = np.full(datatype.size, begin, np.int64)
        for digit in range((max(nbytes - 1, 1).bit_length() + 7) // 8):
            places += _packed(alone, begin, _digits(digit, nbytes)).astype(np.int64) << (8 * digit)
    finally:
        alone.Free()
    return at_blocks(_BYTE, 1, places.tolist(), [1] * len(places), 1)


def _digits(digit: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Return one digit, to base 256, of each of the numbers from 0 to ``nbytes - 1``."""
    return np.resize(np.repeat(np.arange(256, dtype=np.uint8), min(256**digit, nbytes)), nbytes)


def _packed(datatype: MPI.Datatype, begin: int, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    packed = np.empty(datatype.Pack_size(1, MPI.COMM_SELF), np.uint8)
    element = MPI.memory.fromaddress(memory.ctypes.data - begin, memory.nbytes)
    end = datatype.Pack(element, packed, 0, MPI.COMM_SELF)
    assert end == datatype.size, "MPI packs more than the elements"
    return packed[:end]


@dataclass(frozen=True)
class Elements:
    """Elements of a derived datatype: ``layout`` is the layout of all of them, from ``address`` on."""

    address: int
    layout: DatatypeLayout


@dataclass(frozen=True)
class Capacity:
    """The memory of the argument ``name`` in which elements must lie."""

    name: str
    pointer: int
    nbytes: int
    device: int | None = None
    """The GPU for MPI.BOTTOM, because its elements lie at any addresses of that GPU; else None."""

    def require(self, address: int, count: int, block: DatatypeLayout) -> None:
        """Raise `InvalidUsageError` if ``count`` elements at ``address``, laid out as ``block``, exceed the memory."""
        if self.device is not None:
            for region in block.regions:
                self._require_on_device(address, region, self.device)
            return
        begin, end = (address - self.pointer + each for each in (block.begin, block.end))
        if block.regions and (begin < 0 or end > self.nbytes):
            raise InvalidUsageError(
                f"{self.name}: {count} elements of the datatype reach from byte {begin} to byte {end} of a buffer of "
                f"{self.nbytes} bytes: pass a larger buffer or another count"
            )

    def _require_on_device(self, address: int, region: Region, device: int) -> None:
        begin, end = region.ends
        if region.loops and not _lies_together(address + begin, end - begin):
            for number in range(region.loops[0].rounds):  # each round may lie in another allocation
                self._require_on_device(address, rounds_of(region, number, number + 1), device)
            return
        _require_device_addresses(address + begin, end - begin, device, self.name)


def elements_at(datatype: MPI.Datatype, room: Capacity, blocks: Sequence[tuple[int, int]]) -> tuple[Elements, ...]:
    """Return the elements of each block. A block is a displacement in bytes and a count. Local.

    Raises `InvalidUsageError` for a datatype that is not committed, and for elements that exceed the memory.
    """
    name = room.name
    known = known_of(datatype)
    known.committed = known.committed or is_committed(datatype)
    if not known.committed:
        which = datatype.name or f"of {datatype.size} bytes and extent {datatype.extent}"
        raise RefusedByMpiError(f"{name}: the datatype {which} is not committed: call its Commit() first", MPI.ERR_TYPE)
    layout = known.layout
    assert layout is not None, "DATATYPE_NULL"
    found = []
    for displ, count in blocks:
        block = layout.repeated(count)
        room.require(room.pointer + displ, count, block)
        found.append(Elements(room.pointer + displ, block))
    return tuple(found)


def require_types(types: Any, counts: Sequence[int], name: str, peer: str) -> list[MPI.Datatype]:
    """Return the datatypes of an argument of Alltoallw, with MPI.BYTE for each DATATYPE_NULL without elements.

    Raises `InvalidUsageError` unless each ``peer`` has a datatype and a count of 0 or more, and `TypeError` for what is
    no datatype.
    """
    if not isinstance(types, Sequence):
        raise TypeError(f"{name}: {types!r} are no datatypes: pass a sequence with an MPI.Datatype for each {peer}")
    datatypes = list(types)
    if len(datatypes) != len(counts):
        raise InvalidUsageError(
            f"{name}: {len(datatypes)} datatypes for {len(counts)} {peer}s: pass one for each {peer}"
        )
    for datatype in datatypes:
        if not isinstance(datatype, MPI.Datatype):
            raise TypeError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype for each {peer}")
    for number, (datatype, count) in enumerate(zip(datatypes, counts, strict=True)):
        if count < 0:
            raise RefusedByMpiError(f"{name}: count {count} is negative: pass 0 or more", MPI.ERR_COUNT)
        if datatype == MPI.DATATYPE_NULL:
            if count > 0:
                raise RefusedByMpiError(
                    f"{name}: the datatype for {peer} {number} is MPI.DATATYPE_NULL, but its count is {count}: pass "
                    "another datatype or count 0",
                    MPI.ERR_TYPE,
                )
            datatypes[number] = MPI.BYTE
    return datatypes


def is_committed(datatype: MPI.Datatype) -> bool:
    """Return whether MPI takes a datatype for communication. Local.

    MPI has no inquiry for it, but refuses other datatypes in messages. This function makes a request that it
    never starts. MPI need not check the datatype of a message without elements or without a receiver. So this message
    has an element and goes to this process.
    """
    own = MPI.Intracomm(MPI.COMM_SELF)
    handler = own.Get_errhandler()
    own.Set_errhandler(MPI.ERRORS_RETURN)  # the program may have chosen that errors end it
    try:
        own.Send_init([bytearray(1), 1, datatype], 0).Free()
    except MPI.Exception as error:
        if error.Get_error_class() != MPI.ERR_TYPE:
            raise
        return False
    finally:
        own.Set_errhandler(handler)
        handler.Free()
    return True


def _require_device_addresses(address: int, nbytes: int, device: int, name: str) -> None:
    """Raise `InvalidUsageError` unless the ``nbytes`` bytes at ``address`` are memory of that GPU. Local."""
    place = memory_location.place_of(address)
    if place is None or place.managed or place.device != device:
        lies = "in host memory" if place is None or place.managed else f"on GPU {place.device}"
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM with address {address:#x}, which lies {lies}, and another address on GPU {device}: "
            "let all addresses lie in memory of one kind"
        )
    if nbytes > place.nbytes:
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM: {nbytes} bytes at address {address:#x} on GPU {device} go beyond their allocation, "
            f"which ends {place.nbytes} bytes after the address: pass other counts or datatypes"
        )


def _lies_together(address: int, nbytes: int) -> bool:
    """Return whether the ``nbytes`` bytes at ``address`` lie in one allocation of a GPU. Local."""
    place = memory_location.place_of(address)
    return place is not None and nbytes <= place.nbytes
