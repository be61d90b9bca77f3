"""The grammar of buffer arguments: takes lists such as ``[buf, counts, displs, type]`` apart, as mpi4py does.

The forms are ``buf``, ``[buf, count]``, ``[buf, type]``, ``[buf, count, type]`` and ``[buf, (count, displ), type]``.
Vector calls also take ``[buf, counts]``, ``[buf, (counts, displs)]`` and ``[buf, counts, displs, type]``. The calls
with a datatype for each block take ``[buf, types]``, ``[buf, (counts, displs), types]`` and
``[buf, counts, displs, types]``. Counts and displacements are in elements of the type; if each block has a datatype,
displacements are in bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any, Literal

import numpy as np
from mpi4py import MPI

from mpicomm.devices import memory_location
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import ArrayMemory, array_of
from mpicomm.mpi.errors import RefusedByMpiError, UnknownElementsError, UnknownTypeError

Shape = Literal["one", "blocks", "vector", "by_recvcounts", "typed"]
"""How a call reads a buffer. "one": one block. "blocks": an equal block for each rank. "vector": a block of any count
and displacement for each rank. "by_recvcounts": blocks that ``recvcounts`` cuts, one after the other. "typed": a block
of any datatype, count and displacement for each rank. In a collective of neighbours each neighbour has a block."""

_Datatype = MPI.Datatype
_LISTS, _TYPES = (list, tuple), (_Datatype, str)


def parts_of(spec: Any, pairs: Any = tuple) -> Sequence[Any] | None:
    """Return the buffer, counts, displacements and datatype of a list, None for what it lacks; None for other lists.

    ``pairs`` are the classes of an item that holds both counts and displacements.
    """
    length, datatype = len(spec), None
    if length == 3:
        buffer, counts, datatype = spec
    elif length == 2:
        buffer, counts = spec
        kind = type(counts)  # asked first, because `isinstance` with several classes takes long
        if kind is _Datatype or (kind is not list and kind is not int and isinstance(counts, _TYPES)):
            return buffer, None, None, counts
    else:
        return spec if length == 4 else None
    if not isinstance(counts, pairs):
        return buffer, counts, None, datatype
    return (buffer, *counts, datatype) if len(counts) == 2 else None


def items(spec: Any, name: str, shape: Shape = "blocks") -> Sequence[Any]:
    """Return the buffer, counts, displacements and datatype of an argument, with None for each missing item.

    Raises `InvalidUsageError` for a list of another length, and `TypeError` for an argument that has to be a list.
    """
    parts: Sequence[Any] | None
    if shape == "typed":
        if not isinstance(spec, _LISTS):
            raise TypeError(f"{name}: {spec!r}: pass a list, [buffer, counts, displacements, datatypes]")
        if len(spec) == 2:
            return spec[0], None, None, spec[1]
        if len(spec) == 3 and not hasattr(spec[1], "__len__"):
            raise TypeError(f"{name}: {spec[1]!r}: pass (counts, displacements)")
        parts = parts_of(spec, object)
    elif isinstance(spec, _LISTS):
        parts = parts_of(spec, tuple if shape == "vector" else _LISTS)  # a list of a vector call means counts
    else:
        return spec, None, None, None
    if parts is not None:
        return parts
    if 2 <= len(spec) <= 3:
        raise InvalidUsageError(f"{name}: {spec[1]!r} has {len(spec[1])} items: pass (count, displacement)")
    raise InvalidUsageError(
        f"{name} has {len(spec)} items: pass 2 to 4, [buffer, count], [buffer, type], [buffer, count, type] or "
        "[buffer, count, displacement, type]"
    )


def with_buffer(spec: Any, buffer: Any, dtype: np.dtype[Any] | None, *, by_name: bool = False) -> Any:
    """Return a buffer argument with another buffer, and with the type of its elements if it has no type.

    A type that MPI lacks is named by a text if ``by_name``; else it raises `InvalidUsageError`.
    """
    is_list = isinstance(spec, _LISTS)
    # The last of three or four items is the type. The types of Alltoallw are a sequence, which may be empty.
    if is_list and (spec[-1] is not None if len(spec) > 2 else isinstance(array_of(spec[-1]), _TYPES)):
        return [buffer, *spec[1:]]
    datatype: Any = None if dtype is None else types.mpi_datatype(dtype)
    if datatype is None and dtype is not None and by_name:
        datatype = dtype.name
    if datatype is None:
        raise InvalidUsageError(f"elements of type {dtype} have no type in MPI")
    more = spec[1:] if is_list else ()
    if more and more[-1] is None:  # it is the missing type, as in [array, (counts, displacements), None]
        more = more[:-1]
    return [buffer, *more, datatype]


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
    """Return whether counts or displacements are a sequence, not one integer."""
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
    if values is None:
        raise TypeError(f"{name}: {what} are missing: pass a sequence of integers, one for each {peer}")
    # The check reads the items before the length, as mpi4py does, so that two faults raise the same error.
    indices = tuple(index_of(values[i], what, name) for i in range(len(values)))
    if len(indices) != size:
        raise InvalidUsageError(f"{name}: {len(indices)} {what} for {size} {peer}s: pass one for each {peer}")
    return indices


def displacements(values: Any, size: int, name: str, peer: str) -> tuple[int, ...]:
    """Return displacements, one for each peer. One integer is the distance between two blocks."""
    if is_sequence(values):
        return indices_of(values, size, "displacements", name, peer)
    distance = index_of(values, "displacement", name)
    return tuple(distance * number for number in range(size))


def typed_blocks(
    spec: Any, *, size: int, name: str, peer: str
) -> tuple[tuple[int, ...], tuple[int, ...], list[MPI.Datatype]]:
    """Return the counts, the displacements and the datatypes of an argument of Alltoallw. Local.

    The datatype is MPI.BYTE for each DATATYPE_NULL without elements. Raises `TypeError` and `InvalidUsageError`.
    """
    buffer, counts, displs, given = items(spec, name, "typed")
    if buffer is MPI.BOTTOM and (counts is None or displs is None):
        raise InvalidUsageError(f"{name}: MPI.BOTTOM needs counts and displacements: pass one of each for each {peer}")
    if counts is None and displs is None:
        each, starts = (1,) * size, (0,) * size
    else:
        each = indices_of(counts, size, "counts", name, peer)
        starts = indices_of(displs, size, "displacements", name, peer)
    if not isinstance(given, Sequence):
        raise TypeError(f"{name}: {given!r} are no datatypes: pass a sequence with an MPI.Datatype for each {peer}")
    datatypes = list(given)
    if len(datatypes) != size:
        raise InvalidUsageError(f"{name}: {len(datatypes)} datatypes for {size} {peer}s: pass one for each {peer}")
    for datatype in datatypes:
        if not isinstance(datatype, MPI.Datatype):
            raise TypeError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype for each {peer}")
    for number, count in enumerate(each):
        if count < 0:
            raise RefusedByMpiError(f"{name}: count {count} is negative: pass 0 or more", MPI.ERR_COUNT)
        if datatypes[number] == MPI.DATATYPE_NULL:
            if count > 0:
                raise RefusedByMpiError(
                    f"{name}: the datatype for {peer} {number} is MPI.DATATYPE_NULL, but its count is {count}: pass "
                    "another datatype or count 0",
                    MPI.ERR_TYPE,
                )
            datatypes[number] = MPI.BYTE
    return each, starts, datatypes


def no_type(memory: ArrayMemory, name: str) -> UnknownElementsError:
    """Return the error for elements that have no type."""
    what = "elements of unknown type" if memory.dtype is None else f"elements of type {memory.dtype}"
    return UnknownElementsError(
        f"{name} has {what}, for which neither MPI nor mpicomm has a type: convert it, or move it as bytes with "
        "[buffer, MPI.BYTE]"
    )


def require_host_addresses(spec: Any, name: str) -> None:
    """Raise `InvalidUsageError` if the argument ``name`` is MPI.BOTTOM with addresses of device memory. Local."""
    found = device_address(spec)
    if found is not None:
        address, device = found
        raise InvalidUsageError(
            f"{name}: MPI.BOTTOM with address {address:#x}, which lies on GPU {device}: only MPI can carry this call "
            "out, and it cannot access the address: pass the array itself, and displacements from its start"
        )


def device_address(spec: Any) -> tuple[int, int] | None:
    """Return an address of device memory and the ordinal of its GPU if ``spec`` is MPI.BOTTOM with such an address.

    Local. Return None if all addresses are on the host, and for every other argument.
    """
    if not isinstance(spec, _LISTS) or not spec or spec[0] is not MPI.BOTTOM or not memory_location.has_driver():
        return None
    items = list(_flat(spec[1:]))
    numbers = {0, *(int(each) for each in items if isinstance(each, Integral))}  # counts are too small to be addresses
    for datatype in items:
        if not isinstance(datatype, MPI.Datatype) or datatype == MPI.DATATYPE_NULL:
            continue
        starts = [datatype.Get_true_extent()[0]]
        if datatype.combiner in (MPI.COMBINER_STRUCT, MPI.COMBINER_HINDEXED, MPI.COMBINER_HINDEXED_BLOCK):
            starts += datatype.decode()[2]["displacements"]  # each part may lie in memory of another kind
        for unit in {1, datatype.extent}:  # Alltoallw has displacements in bytes, the other calls in extents
            for address in (number * unit + start for start in starts for number in numbers):
                device = memory_location.device_of(address)
                if device is not None:
                    return address, device
    return None


def _flat(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        if isinstance(item, str):
            yield MPI.Datatype.fromcode(item)
        elif isinstance(item, Iterable):
            yield from _flat(item)
        else:
            yield item
