"""Elements of derived datatypes in device memory, which kernels pack and unpack, and the buffers of Alltoallw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.bottom import lies_together, require_device_addresses
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.layout import DatatypeLayout, known_of
from mpicomm.mpi.regions import Region, rounds_of


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
        if region.loops and not lies_together(address + begin, end - begin):
            for number in range(region.loops[0].rounds):  # each round may lie in another allocation
                self._require_on_device(address, rounds_of(region, number, number + 1), device)
            return
        require_device_addresses(address + begin, end - begin, device, self.name)


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
