"""Elements of derived datatypes in device memory, which kernels pack and unpack; and the buffers of Alltoallw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.layout import Layout, layout_of


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
    layout = layout_of(datatype)
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


def require_types(types: Any, size: int, name: str, peer: str) -> list[MPI.Datatype]:
    """Return the datatypes of an argument of Alltoallw. Raises `InvalidUsageError` unless there is one per ``peer``."""
    datatypes = list(types) if isinstance(types, Sequence) and not isinstance(types, str) else [types]
    for datatype in datatypes:
        if not isinstance(datatype, MPI.Datatype):
            raise InvalidUsageError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype for each {peer}")
    if len(datatypes) != size:
        raise InvalidUsageError(f"{name}: {len(datatypes)} datatypes for {size} {peer}s: pass one for each {peer}")
    return datatypes
