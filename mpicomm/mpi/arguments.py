"""Buffer arguments of MPI calls, in all the forms that mpi4py takes: what they are becomes an `Operand`.

``buf``, ``[buf, count]``, ``[buf, type]``, ``[buf, count, type]``, ``[buf, (count, displ), type]``; for the vector
calls ``[buf, counts]``, ``[buf, (counts, displs)]``, ``[buf, counts, displs, type]``. Counts and displacements are in
elements of the type. Two things differ from mpi4py: a count that goes beyond the end of the buffer is an error here,
and so are, of one kind, what mpi4py raises as KeyError, BufferError, OverflowError or MPI.Exception.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import Memory, no_buffer, read
from mpicomm.mpi.span import Span


# Not frozen, as nothing on the way of every call is: a frozen one takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class Operand:
    """A buffer argument: memory, the type of its elements, and how many of them in which places."""

    name: str
    pointer: int
    """Address of element 0, displacement applied; of vector forms, the start of the buffer."""
    dtype: np.dtype[Any] | None
    """None where only MPI can handle the argument, a derived datatype or ``MPI.BOTTOM``: ``mpi_type`` says."""
    count: int
    """Elements of one block; of vector forms, of all."""
    total: int
    """Elements of all blocks."""
    counts: tuple[int, ...] | None
    """Elements of each block, of vector forms alone."""
    displs: tuple[int, ...] | None
    """Where each block starts, in elements from ``pointer``, of vector forms alone."""
    on_device: bool
    device: int | None
    """Ordinal of the GPU; None on the host, and where the array does not tell (a CUDA array interface)."""
    owner: Any = field(repr=False)
    """What keeps the memory alive."""
    mpi_type: MPI.Datatype | None
    """The datatype that the caller named."""
    spec: Any = field(repr=False)
    """The argument as it was passed."""

    @property
    def nbytes(self) -> int:
        """Bytes of all elements; 0 where ``dtype`` is None."""
        return 0 if self.dtype is None else self.total * self.dtype.itemsize

    def block(self, rank: int) -> Span:
        """Return the part that goes to or comes from ``rank``; ``dtype`` is not None."""
        assert self.dtype is not None
        if self.counts is None or self.displs is None:
            return Span(self.pointer + rank * self.count * self.dtype.itemsize, self.count)
        return Span(self.pointer + self.displs[rank] * self.dtype.itemsize, self.counts[rank])

    def whole(self) -> Span:
        """Return all of a form that is no vector form."""
        assert self.counts is None
        return Span(self.pointer, self.total)


def parse(spec: Any, *, blocks: int | None = None, writable: bool, name: str, memory: Memory | None = None) -> Operand:
    """Understand the argument ``name``. Local.

    ``blocks`` is for arguments that hold one block per rank, the receive buffer of an allgather say: where no count is
    given the elements are shared out evenly; one that is given is the count of a block. ``writable`` is for receive
    buffers. ``memory`` is the array's, where it was read before. Handle ``MPI.IN_PLACE`` and None before.

    Raises `TypeError` for objects that are no buffers and for counts that are no integers, `InvalidUsageError` for
    everything else.
    """
    parts = blocks or 1
    if not isinstance(spec, (list, tuple)):
        memory = memory or read(spec, writable, name)
        dtype = memory.dtype
        if dtype is None and not memory.on_device:  # MPI may know
            return Operand(name, memory.pointer, None, 0, 0, None, None, False, None, memory.owner, None, spec)
        if not types.is_plain(dtype):
            raise _no_type(memory, name)
        assert dtype is not None
        count, rest = divmod(memory.nbytes // dtype.itemsize, parts)
        if rest:
            raise _uneven(memory.nbytes // dtype.itemsize, parts, name)
        return Operand(
            name, memory.pointer, dtype, count, count * parts, None, None,
            memory.on_device, memory.device, memory.owner, None, spec,
        )  # fmt: skip
    buffer, count, displ, datatype = _items(spec, name)
    if isinstance(count, (list, tuple)) and len(spec) < 4:
        count, displ = _pair(count, name)
    element = _Element(buffer, datatype, writable, name, memory)
    start = 0 if displ is None else _index(displ, "displacement", name)
    entries = element.entries - start
    if start > 0:
        element.require_extent(name)
    if start < 0 or entries < 0:
        raise InvalidUsageError(
            f"{name}: displacement {start} lies outside the buffer, which holds {element.entries} elements"
        )
    if count is None:
        element.require_whole_elements(name)
        count, rest = divmod(entries, parts)
        if rest:
            raise _uneven(entries, parts, name)
    else:
        count = _index(count, "count", name)
        element.require_room(count, 0, parts * count, entries, name)
    return element.operand(spec, name, start, count, parts * count, None, None)


def parse_vector(spec: Any, *, size: int, writable: bool, name: str) -> Operand:
    """Understand the argument ``name`` of a vector call, one block for each of ``size`` ranks. Local.

    Counts that are not given share the elements out, earlier ranks getting one more where it does not come out even;
    one integer is the count of every rank. Displacements that are not given follow from the counts; one integer is the
    distance of two blocks. Raises as `parse` does.
    """
    if spec is None:
        raise no_buffer(spec, name)  # in a list, with a type, it is an empty buffer
    is_list = isinstance(spec, (list, tuple))
    buffer, counts, displs, datatype = _items(spec, name) if is_list else (spec, None, None, None)
    if isinstance(counts, tuple) and len(spec) < 4:  # a list is counts, as mpi4py has it
        counts, displs = _pair(counts, name)
    element = _Element(buffer, datatype, writable, name)
    if counts is None:
        element.require_whole_elements(name)
        share, more = divmod(element.entries, size)
        each = tuple(share + (rank < more) for rank in range(size))
    elif _is_sequence(counts):
        each = _indices(counts, size, "counts", name)
    else:
        each = (_index(counts, "count", name),) * size
    if displs is None:
        ends = [0]
        for n in each:
            ends.append(ends[-1] + n)
        places = tuple(ends[:-1])
    elif _is_sequence(displs):
        places = _indices(displs, size, "displacements", name)
    else:
        distance = _index(displs, "displacement", name)
        places = tuple(distance * rank for rank in range(size))
    for n, place in zip(each, places, strict=True):
        element.require_room(n, place, place + n, element.entries, name)
    total = sum(each)
    return element.operand(spec, name, 0, total, total, each, places)


def overlaps(a: Operand, b: Operand) -> bool:
    """Whether two operands have memory in common. Those that only MPI can handle do not: that is for MPI to find."""
    first, second = _extents(a), _extents(b)
    i = j = 0
    while i < len(first) and j < len(second):
        if first[i][1] <= second[j][0]:
            i += 1
        elif second[j][1] <= first[i][0]:
            j += 1
        else:
            return True
    return False


def require_separate(send: Operand, receive: Operand, *, reduction: bool = False) -> None:
    """Raise `InvalidUsageError` if the two have memory in common; in a reduction they may be the very same memory."""
    if not overlaps(send, receive):
        return
    if reduction and send.pointer == receive.pointer and send.total == receive.total and send.dtype == receive.dtype:
        return
    raise InvalidUsageError(
        f"{send.name} and {receive.name} overlap: pass MPI.IN_PLACE where the data is in the receive buffer already, "
        "or copy one of them"
    )


def _extents(operand: Operand) -> list[tuple[int, int]]:
    """The bytes of an operand, as sorted pairs of start and end."""
    if operand.dtype is None or operand.total == 0:
        return []
    itemsize = operand.dtype.itemsize
    if operand.counts is None or operand.displs is None:
        return [(operand.pointer, operand.pointer + operand.total * itemsize)]
    return sorted(
        (operand.pointer + place * itemsize, operand.pointer + (place + n) * itemsize)
        for n, place in zip(operand.counts, operand.displs, strict=True)
        if n > 0
    )


class _Element:
    """The buffer of a specification, and the elements that it holds."""

    def __init__(self, buffer: Any, datatype: Any, writable: bool, name: str, memory: Memory | None = None) -> None:
        self.bottom = buffer is MPI.BOTTOM
        self.absent = buffer is None
        if self.bottom or self.absent:
            if datatype is None:
                raise InvalidUsageError(f"{name}: {buffer!r} as the buffer needs a datatype: [{buffer!r}, count, type]")
            self.memory = Memory(0, 0, None, False, None, None)
        else:
            self.memory = memory or read(buffer, writable, name)
        self.mpi_type: MPI.Datatype | None = None
        if datatype is None:
            self.dtype = self.memory.dtype
            if self.dtype is None and not self.memory.on_device:
                self.mpi_type = MPI.BYTE  # a stand-in: MPI may know the type, and finds it out itself
            elif not types.is_plain(self.dtype):
                raise _no_type(self.memory, name)
        else:
            self.dtype, self.mpi_type = _datatype(datatype, name)
        self.extent = self.dtype.itemsize if self.dtype is not None else self._mpi_extent()
        self.entries, self.rest = divmod(self.memory.nbytes, self.extent) if self.extent > 0 else (0, 0)

    def _mpi_extent(self) -> int:
        assert self.mpi_type is not None
        return self.mpi_type.Get_extent()[1]

    def require_extent(self, name: str) -> None:
        """Raise for a derived datatype of which no element follows another."""
        if self.extent <= 0:
            raise InvalidUsageError(
                f"{name}: elements of a datatype whose extent is {self.extent} cannot be counted: give a count and no "
                "displacement"
            )

    def require_whole_elements(self, name: str) -> None:
        """Raise unless the buffer holds a whole number of elements."""
        if self.memory.nbytes:
            self.require_extent(name)
        if self.rest:
            raise InvalidUsageError(
                f"{name}: {self.memory.nbytes} bytes are no multiple of the {self.extent} bytes of an element: give a "
                "count"
            )

    def require_room(self, count: int, start: int, end: int, entries: int, name: str) -> None:
        """Raise unless the elements from ``start`` to ``end`` are in the buffer; only MPI knows for derived types."""
        if count < 0:
            raise InvalidUsageError(f"{name}: count {count} is negative")
        if count == 0 or self.bottom or (self.dtype is None and not self.absent):
            return
        if self.absent:
            raise InvalidUsageError(f"{name}: the buffer is None, but its count is {count}: pass a buffer or count 0")
        if start < 0 or end > entries:
            raise InvalidUsageError(
                f"{name}: elements {start} to {end} are asked for, but the buffer holds {max(entries, 0)}"
                f"{' from its displacement on' if entries < self.entries else ''}: pass a larger one or other counts"
            )

    def operand(
        self,
        spec: Any,
        name: str,
        start: int,
        count: int,
        total: int,
        counts: tuple[int, ...] | None,
        displs: tuple[int, ...] | None,
    ) -> Operand:
        memory = self.memory
        pointer = memory.pointer + start * self.extent
        dtype = None if self.bottom else self.dtype
        return Operand(
            name, pointer, dtype, count, total, counts, displs,
            memory.on_device, memory.device, memory.owner, self.mpi_type, spec,
        )  # fmt: skip


def _items(spec: list[Any] | tuple[Any, ...], name: str) -> tuple[Any, Any, Any, Any]:
    """The buffer, counts, displacements and datatype of a specification; None for what is not there."""
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


def _pair(counts: list[Any] | tuple[Any, ...], name: str) -> tuple[Any, Any]:
    if len(counts) != 2:
        raise InvalidUsageError(f"{name}: {counts!r} has {len(counts)} items: pass (count, displacement)")
    return counts[0], counts[1]


def _datatype(datatype: Any, name: str) -> tuple[np.dtype[Any] | None, MPI.Datatype | None]:
    if isinstance(datatype, MPI.Datatype):
        if datatype == MPI.DATATYPE_NULL:
            raise InvalidUsageError(f"{name}: the datatype is MPI.DATATYPE_NULL: pass another, MPI.FLOAT say")
        return types.numpy_dtype(datatype), datatype
    if isinstance(datatype, str):
        try:
            return types.from_code(datatype)
        except ValueError as error:
            raise InvalidUsageError(
                f"{name}: {error}: pass an MPI.Datatype or a typecode such as 'd' or 'i4'"
            ) from error
    raise InvalidUsageError(f"{name}: {datatype!r} is no datatype: pass an MPI.Datatype or a typecode such as 'd'")


def _is_sequence(value: Any) -> bool:
    try:
        len(value)
    except TypeError:  # also a NumPy array without dimensions, which is one integer
        return False
    return True


def _index(value: Any, what: str, name: str) -> int:
    try:
        index = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: {what} {value!r} is no integer") from None
    if not -(2**63) <= index < 2**63:
        raise InvalidUsageError(f"{name}: {what} {index} is more than MPI can count")
    return index


def _indices(values: Any, size: int, what: str, name: str) -> tuple[int, ...]:
    # Items before length, as in mpi4py: of two errors it is the same one that is raised.
    indices = tuple(_index(values[i], what, name) for i in range(len(values)))
    if len(indices) != size:
        raise InvalidUsageError(f"{name}: {len(indices)} {what} for {size} ranks: pass one for each")
    return indices


def _uneven(entries: int, blocks: int, name: str) -> InvalidUsageError:
    return InvalidUsageError(
        f"{name}: {entries} elements are no multiple of {blocks}, one block for each rank: give a count, or use the "
        "vector call (Allgatherv, Alltoallv, ...)"
    )


def _no_type(memory: Memory, name: str) -> InvalidUsageError:
    what = "elements of unknown type" if memory.dtype is None else f"elements of type {memory.dtype}"
    return InvalidUsageError(
        f"{name} has {what}, which neither MPI nor mpicomm has a type for: convert it, or move it as bytes with "
        "[buffer, MPI.BYTE]"
    )
