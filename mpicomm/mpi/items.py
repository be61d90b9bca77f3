"""The items of a buffer argument that is a list: counts, displacements and datatypes."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import ArrayMemory, UnknownElementsError
from mpicomm.mpi.faults import RefusedByMpiError, UnknownTypeError


def items(spec: list[Any] | tuple[Any, ...], name: str) -> tuple[Any, Any, Any, Any]:
    """Return the buffer, counts, displacements and datatype of a specification, with None for each missing item."""
    if len(spec) == 2:
        buffer, second = spec
        if isinstance(second, (MPI.Datatype, str)):
            return buffer, None, None, second
        return buffer, second, None, None
    if len(spec) == 3:
        buffer, counts, datatype = spec
        return buffer, counts, None, datatype
    if len(spec) == 4:
        buffer, counts, displs, datatype = spec
        return buffer, counts, displs, datatype
    raise InvalidUsageError(
        f"{name} has {len(spec)} items: pass 2 to 4, [buffer, count], [buffer, type], [buffer, count, type] or "
        "[buffer, count, displacement, type]"
    )


def pair(counts: list[Any] | tuple[Any, ...], name: str) -> tuple[Any, Any]:
    """Return the counts and displacements of one item. Raises `InvalidUsageError` unless the item has two parts."""
    if len(counts) != 2:
        raise InvalidUsageError(f"{name}: {counts!r} has {len(counts)} items: pass (count, displacement)")
    return counts[0], counts[1]


def datatype_of(datatype: Any, name: str) -> tuple[np.dtype[Any] | None, MPI.Datatype | None]:
    """Return NumPy's type and MPI's datatype for a datatype or its type code, with None for a missing one."""
    if isinstance(datatype, MPI.Datatype):
        if datatype == MPI.DATATYPE_NULL:
            raise RefusedByMpiError(
                f"{name}: the datatype is MPI.DATATYPE_NULL: pass another, such as MPI.FLOAT", MPI.ERR_TYPE
            )
        return types.numpy_dtype(datatype), datatype
    if isinstance(datatype, str):
        try:
            return types.from_code(datatype)
        except ValueError as error:
            raise UnknownTypeError(
                f"{name}: {error}: pass an MPI.Datatype or a typecode such as 'd' or 'i4'"
            ) from error
    raise UnknownTypeError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype or a typecode such as 'd'")


def is_sequence(value: Any) -> bool:
    """Return whether a value is more than one integer."""
    try:
        len(value)
    except TypeError:  # a NumPy array without dimensions is also one integer
        return False
    return True


def index_of(value: Any, what: str, name: str) -> int:
    """Return a value as an integer of 64 bits. Raises `TypeError` or `InvalidUsageError` for other values."""
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {what} {value!r} is no integer: pass an integer") from None
    if not -(2**63) <= index < 2**63:
        raise InvalidUsageError(f"{name}: {what} {index} does not fit into 64 bits: pass a smaller one")
    return index


def indices_of(values: Any, size: int, what: str, name: str, peer: str) -> tuple[int, ...]:
    """Return values as integers, one for each peer.

    Raises the errors of `index_of`, and `InvalidUsageError` for a wrong number.
    """
    # The check reads the items before the length, as mpi4py does, so that two faults raise the same error.
    indices = tuple(index_of(values[i], what, name) for i in range(len(values)))
    if len(indices) != size:
        raise InvalidUsageError(f"{name}: {len(indices)} {what} for {size} {peer}s: pass one for each {peer}")
    return indices


def uneven(entries: int, blocks: int, name: str, peer: str) -> InvalidUsageError:
    """Return the error for elements that do not make equal blocks."""
    return InvalidUsageError(
        f"{name}: {entries} elements are no multiple of {blocks}, one block for each {peer}: pass a count, or use the "
        "vector call (Allgatherv, Alltoallv, ...)"
    )


def no_type(memory: ArrayMemory, name: str) -> UnknownElementsError:
    """Return the error for elements that have no type."""
    what = "elements of unknown type" if memory.dtype is None else f"elements of type {memory.dtype}"
    return UnknownElementsError(
        f"{name} has {what}, for which neither MPI nor mpicomm has a type: convert it, or move it as bytes with "
        "[buffer, MPI.BYTE]"
    )
