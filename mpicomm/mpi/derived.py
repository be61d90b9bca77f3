"""Elements of derived datatypes in device memory, which kernels pack and unpack; and the buffers of Alltoallw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.committed import is_committed
from mpicomm.mpi.layout import Layout, known_of


@dataclass(frozen=True)
class Elements:
    """Elements of a derived datatype: ``layout`` has all of them, from ``address`` on."""

    address: int
    layout: Layout


def elements_at(
    datatype: MPI.Datatype, pointer: int, nbytes: int, blocks: Sequence[tuple[int, int]], name: str
) -> tuple[Elements, ...] | None:
    """Return the elements of each block, which is a displacement in bytes and a count; None for an uncovered type.

    They lie in the ``nbytes`` bytes at ``pointer``, which are the argument ``name``. Local. Raises `InvalidUsageError`
    for a datatype that is not committed, and for elements that leave the buffer.
    """
    known = known_of(datatype)
    known.committed = known.committed or is_committed(datatype)
    if not known.committed:
        which = datatype.name or f"of {datatype.size} bytes and extent {datatype.extent}"
        raise InvalidUsageError(f"{name}: the datatype {which} is not committed: call its Commit() first")
    layout = known.layout
    if layout is None:
        return None
    return tuple(_elements(layout, pointer, nbytes, displ, count, name) for displ, count in blocks)


def _elements(layout: Layout, pointer: int, nbytes: int, displ: int, count: int, name: str) -> Elements:
    block = layout.repeated(count)
    if block.regions and (displ + block.begin < 0 or displ + block.end > nbytes):
        raise InvalidUsageError(
            f"{name}: {count} elements of the datatype reach from byte {displ + block.begin} to byte "
            f"{displ + block.end} of a buffer of {nbytes} bytes: pass a larger buffer or another count"
        )
    return Elements(pointer + displ, block)


def require_types(types: Any, counts: Sequence[int], name: str, peer: str) -> list[MPI.Datatype]:
    """Return the datatypes of an argument of Alltoallw; any datatype stands for DATATYPE_NULL without elements.

    Raises `InvalidUsageError` unless each ``peer`` has a datatype and a count of 0 or more.
    """
    datatypes = list(types) if isinstance(types, Sequence) and not isinstance(types, str) else [types]
    for datatype in datatypes:
        if not isinstance(datatype, MPI.Datatype):
            raise InvalidUsageError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype for each {peer}")
    if len(datatypes) != len(counts):
        raise InvalidUsageError(
            f"{name}: {len(datatypes)} datatypes for {len(counts)} {peer}s: pass one for each {peer}"
        )
    for number, (datatype, count) in enumerate(zip(datatypes, counts, strict=True)):
        if count < 0:
            raise InvalidUsageError(f"{name}: count {count} is negative: pass 0 or more")
        if datatype == MPI.DATATYPE_NULL:
            if count > 0:
                raise InvalidUsageError(
                    f"{name}: the datatype for {peer} {number} is MPI.DATATYPE_NULL, but its count is {count}: pass "
                    "another datatype or count 0"
                )
            datatypes[number] = MPI.BYTE
    return datatypes
