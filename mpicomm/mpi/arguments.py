"""Buffer arguments of MPI calls, in all the forms that mpi4py takes. The functions read them into an `Operand`.

The forms are ``buf``, ``[buf, count]``, ``[buf, type]``, ``[buf, count, type]`` and ``[buf, (count, displ), type]``.
Vector calls also take ``[buf, counts]``, ``[buf, (counts, displs)]`` and ``[buf, counts, displs, type]``. Counts and
displacements are in elements of the type. Two things differ from mpi4py. A count that goes beyond the end of the buffer
is an error here. If mpi4py raises KeyError, BufferError or MPI.Exception, the error is also `InvalidUsageError`; in
place of OverflowError it is only `InvalidUsageError`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.bottom import device_addressed
from mpicomm.mpi.buffers import ArrayMemory, array_of, no_buffer, read
from mpicomm.mpi.derived import Capacity, Elements, elements_at, require_types
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.items import datatype_of, index_of, indices_of, is_sequence, items, no_type, pair, uneven
from mpicomm.mpi.span import Span


# The class is not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class Operand:
    """A buffer argument: its memory, the type of its elements, and the counts and displacements of its blocks."""

    name: str
    pointer: int
    """The address of element 0, with the displacement; in vector forms the start of the buffer."""
    dtype: np.dtype[Any] | None
    """None if only MPI can handle the argument: a derived datatype, ``MPI.BOTTOM``, or a format of a buffer."""
    count: int
    """The elements of one block; in vector forms of all blocks."""
    total: int
    """The elements of all blocks."""
    counts: tuple[int, ...] | None
    """The elements of each block in vector forms; else None."""
    displs: tuple[int, ...] | None
    """The start of each block in vector forms, in elements from ``pointer``; else None."""
    on_device: bool
    device: int | None
    """The ordinal of the GPU; None on the host."""
    owner: Any = field(repr=False)
    """The object that keeps the memory alive."""
    mpi_type: MPI.Datatype | None
    """The datatype that the caller named."""
    spec: Any = field(repr=False)
    """The argument for MPI: as the caller passed it, or with the exported memory in place of the object."""
    by_address: bool = False
    """Whether it is device memory of no known library, so that the stream of later work on it is unknown."""
    derived: tuple[Elements, ...] | None = None
    """The elements of a derived datatype in device memory, of each block in vector forms; else None."""
    nowhere: bool = False
    """Whether it has no memory: see `ArrayMemory.nowhere`."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements; 0 if ``dtype`` is None."""
        return 0 if self.dtype is None else self.total * self.dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """The bytes of all elements, also of derived datatypes that kernels pack; 0 if only MPI knows them."""
        return self.nbytes if self.derived is None else sum(block.layout.nbytes for block in self.derived)

    def reach(self, start: int) -> int:
        """Return the bytes from the address ``start`` of its buffer to the end of its last element."""
        if self.derived is not None:
            return max(
                (each.address + each.layout.end - start for each in self.derived if each.layout.nbytes), default=0
            )
        if self.dtype is None:
            return 0
        if self.counts is None or self.displs is None:
            end = self.total
        else:
            end = max((displ + n for displ, n in zip(self.displs, self.counts, strict=True) if n), default=0)
        return self.pointer - start + end * self.dtype.itemsize

    def block(self, rank: int) -> Span:
        """Return the block for or from ``rank``. ``dtype`` must not be None."""
        assert self.dtype is not None
        if self.counts is None or self.displs is None:
            return Span(self.pointer + rank * self.count * self.dtype.itemsize, self.count)
        return Span(self.pointer + self.displs[rank] * self.dtype.itemsize, self.counts[rank])

    def whole(self) -> Span:
        """Return all elements. The operand must have no vector form."""
        assert self.counts is None
        return Span(self.pointer, self.total)


def parse(
    spec: Any,
    *,
    blocks: int | None = None,
    writable: bool,
    name: str,
    memory: ArrayMemory | None = None,
    peer: str = "rank",
) -> Operand:
    """Read the argument ``name``. Local.

    ``blocks`` is the number of blocks for arguments with one block per rank, such as the receive buffer of an
    allgather. Errors say ``peer`` for the owner of a block. A count is the count of one block. Without a count the
    blocks share the elements evenly. ``writable`` is for receive buffers. ``memory`` is the memory of the array, if the
    caller has read it already. The caller handles ``MPI.IN_PLACE`` and None.

    Raises `TypeError` for objects that are no buffers and for counts that are no integers, `InvalidUsageError` for all
    other faults.
    """
    number = 1 if blocks is None else blocks
    parts = max(number, 1)  # a rank without neighbours has no blocks, even if its buffer has elements
    if not isinstance(spec, (list, tuple)):
        memory = memory or read(spec, writable, name)
        dtype = memory.dtype
        if dtype is None and not memory.on_device:  # MPI may know the type
            return Operand(
                name, memory.pointer, None, 0, 0, None, None, False, None, memory.owner, None, spec,
                nowhere=memory.nowhere,
            )  # fmt: skip
        if not types.is_plain(dtype):
            raise no_type(memory, name)
        assert dtype is not None
        count, rest = divmod(memory.nbytes // dtype.itemsize, parts)
        if rest:
            raise uneven(memory.nbytes // dtype.itemsize, parts, name, peer)
        return Operand(
            name, memory.pointer, dtype, count, count * number, None, None, memory.on_device, memory.device,
            memory.owner, None, _for_mpi(spec, memory), memory.by_address, nowhere=memory.nowhere,
        )  # fmt: skip
    buffer, count, displ, datatype = items(spec, name)
    if isinstance(count, (list, tuple)) and len(spec) < 4:
        count, displ = pair(count, name)
    if buffer is MPI.BOTTOM:
        memory = _memory_of_bottom(spec)
    element = _Element(buffer, datatype, writable, name, memory)
    start = 0 if displ is None else index_of(displ, "displacement", name)
    entries = (element.entries if count is None else element.room) - start
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
            raise uneven(entries, parts, name, peer)
    else:
        count = index_of(count, "count", name)
        element.require_room(count, 0, number * count, entries, name)
    return element.operand(spec, name, start, count, number * count, None, None)


def parse_vector(
    spec: Any, *, size: int, writable: bool, name: str, peer: str = "rank", memory: ArrayMemory | None = None
) -> Operand:
    """Read the argument ``name`` of a vector call, with one block for each of ``size`` ranks or other peers. Local.

    A single integer as counts is the count of every block. Without counts the blocks share the elements evenly, and the
    first ranks get one more of the elements that remain. A single integer as displacements is the distance between two
    blocks. Without displacements the blocks follow each other. Raises the errors of `parse`.
    """
    if spec is None:
        raise no_buffer(spec, name)  # in a list with a type, None is an empty buffer
    is_list = isinstance(spec, (list, tuple))
    buffer, counts, displs, datatype = items(spec, name) if is_list else (spec, None, None, None)
    if isinstance(counts, tuple) and len(spec) < 4:  # a list means counts, as in mpi4py
        counts, displs = pair(counts, name)
    if buffer is MPI.BOTTOM:
        memory = _memory_of_bottom(spec)
    element = _Element(buffer, datatype, writable, name, memory)
    if counts is None:
        element.require_whole_elements(name)
        share, more = divmod(element.entries, max(size, 1))
        each = tuple(share + (rank < more) for rank in range(size))
    elif is_sequence(counts):
        each = indices_of(counts, size, "counts", name, peer)
    else:
        each = (index_of(counts, "count", name),) * size
    if displs is None:
        ends = [0]
        for n in each:
            ends.append(ends[-1] + n)
        places = tuple(ends[:-1])
    elif is_sequence(displs):
        places = indices_of(displs, size, "displacements", name, peer)
    else:
        distance = index_of(displs, "displacement", name)
        places = tuple(distance * rank for rank in range(size))
    for n, place in zip(each, places, strict=True):
        element.require_room(n, place, place + n, element.room, name)
    total = sum(each)
    return element.operand(spec, name, 0, total, total, each, places)


def parse_typed(
    spec: Any, *, size: int, writable: bool, name: str, peer: str = "rank", memory: ArrayMemory | None = None
) -> Operand:
    """Read the argument ``name`` of Alltoallw, with a datatype for each of ``size`` ranks or other peers. Local.

    Displacements are in bytes. MPI reads arguments in host memory itself. Raises the errors of `parse`.
    """
    if not isinstance(spec, (list, tuple)):
        raise TypeError(f"{name}: {spec!r}: pass a list, [buffer, counts, displacements, datatypes]")
    buffer, *_ = items(spec, name)
    if buffer is MPI.BOTTOM:
        memory = _memory_of_bottom(spec)
    elif buffer is None:
        memory = memory or ArrayMemory(0, 0, None, False, None, None, nowhere=True)
    else:
        memory = memory or read(buffer, writable, name)
    if not memory.on_device:
        return Operand(
            name, memory.pointer, None, 0, 0, None, None, False, None, memory.owner, None, spec, nowhere=memory.nowhere
        )
    each, places, datatypes = typed_blocks(spec, size=size, name=name, peer=peer)
    room = _room_of(memory, name, bottom=buffer is MPI.BOTTOM)
    found: list[Elements] = []
    for datatype, count, place in zip(datatypes, each, places, strict=True):
        found += elements_at(datatype, room, [(place, count)])
    return Operand(
        name, memory.pointer, None, sum(each), sum(each), each, places, True, memory.device, memory.owner, None, spec,
        memory.by_address, tuple(found),
    )  # fmt: skip


def typed_blocks(
    spec: Any, *, size: int, name: str, peer: str
) -> tuple[tuple[int, ...], tuple[int, ...], list[MPI.Datatype]]:
    """Return the counts, the displacements and the datatypes of an argument of Alltoallw. Local.

    Raises the errors of `parse`.
    """
    _, counts, displs, datatypes = items(spec, name)
    if len(spec) == 2:
        counts, displs, datatypes = None, None, spec[1]
    elif len(spec) == 3:
        counts, displs = pair(counts, name)
    each = (1,) * size if counts is None else indices_of(counts, size, "counts", name, peer)
    places = (0,) * size if displs is None else indices_of(displs, size, "displacements", name, peer)
    return each, places, require_types(datatypes, each, name, peer)


def _memory_of_bottom(spec: Any) -> ArrayMemory:
    """Return the memory of an argument with MPI.BOTTOM. Its addresses are addresses of a GPU or of the host."""
    device = device_addressed(spec)
    return ArrayMemory(0, 0, None, device is not None, device, None, by_address=device is not None)


def _room_of(memory: ArrayMemory, name: str, *, bottom: bool) -> Capacity:
    nbytes = memory.nbytes if memory.room is None else memory.room
    return Capacity(name, memory.pointer, nbytes, memory.device if bottom else None)


def with_buffer(spec: Any, buffer: Any, dtype: np.dtype[Any] | None) -> Any:
    """Return a buffer argument with another buffer, and with the type of its elements if it names none.

    Raises `InvalidUsageError` if MPI has no type for the elements.
    """
    is_list = isinstance(spec, (list, tuple))
    # The last of three or four items is the type. The types of Alltoallw are a sequence, which may be empty.
    if is_list and (spec[-1] is not None if len(spec) > 2 else isinstance(array_of(spec[-1]), (MPI.Datatype, str))):
        return [buffer, *spec[1:]]
    datatype = None if dtype is None else types.mpi_datatype(dtype)
    if datatype is None:
        raise InvalidUsageError(f"elements of type {dtype} have no type in MPI")
    more = list(spec[1:]) if is_list else []
    if more and more[-1] is None:  # it is the missing type, as in [array, (counts, displacements), None]
        more.pop()
    return [buffer, *more, datatype]


def _for_mpi(spec: Any, memory: ArrayMemory) -> Any:
    """Return the argument that MPI gets. It names exported memory, because a second export takes as long again."""
    if memory.exported is None or memory.on_device:
        return spec
    try:
        return with_buffer(spec, memory.exported, memory.dtype)
    except InvalidUsageError:
        return spec  # the engines may know the type


class _Element:
    """The buffer of a specification, and the elements that it holds."""

    def __init__(
        self, buffer: Any, datatype: Any, writable: bool, name: str, memory: ArrayMemory | None = None
    ) -> None:
        self.bottom = buffer is MPI.BOTTOM
        self.absent = buffer is None
        if self.bottom or self.absent:
            if datatype is None:
                raise InvalidUsageError(f"{name}: {buffer!r} as the buffer needs a datatype: [{buffer!r}, count, type]")
            self.memory = memory or ArrayMemory(0, 0, None, False, None, None, nowhere=self.absent)
        else:
            self.memory = memory or read(buffer, writable, name)
        self.mpi_type: MPI.Datatype | None = None
        if datatype is None:
            self.dtype = self.memory.dtype
            if self.dtype is None and not self.memory.on_device:
                self.mpi_type = MPI.BYTE  # a stand-in: MPI may know the type, and reads the argument itself
            elif not types.is_plain(self.dtype):
                raise no_type(self.memory, name)
        else:
            self.dtype, self.mpi_type = datatype_of(datatype, name)
        self.extent = self.dtype.itemsize if self.dtype is not None else self._mpi_extent()
        self.entries, self.rest = divmod(self.memory.nbytes, self.extent) if self.extent > 0 else (0, 0)
        self.room = self.entries
        """The elements that counts may reach."""
        if self.memory.room is not None and self.extent > 0:
            self.room = self.memory.room // self.extent

    def _mpi_extent(self) -> int:
        assert self.mpi_type is not None
        return self.mpi_type.Get_extent()[1]

    def require_extent(self, name: str) -> None:
        """Raise for a derived datatype with elements that do not follow each other."""
        if self.extent <= 0:
            raise InvalidUsageError(
                f"{name}: elements of a datatype with the extent {self.extent} cannot be counted: pass a count and no "
                "displacement"
            )

    def require_whole_elements(self, name: str) -> None:
        """Raise unless the buffer holds a whole number of elements."""
        if self.memory.nbytes:
            self.require_extent(name)
        if self.rest:
            raise InvalidUsageError(
                f"{name}: {self.memory.nbytes} bytes are no multiple of the {self.extent} bytes of an element: pass a "
                "count"
            )

    def require_room(self, count: int, start: int, end: int, entries: int, name: str) -> None:
        """Raise unless the elements from ``start`` to ``end`` are in the buffer. MPI checks derived types itself."""
        if count < 0:
            raise RefusedByMpiError(f"{name}: count {count} is negative: pass 0 or more", MPI.ERR_COUNT)
        if count == 0 or self.bottom or (self.dtype is None and not self.absent):
            return
        if self.absent:
            raise InvalidUsageError(f"{name}: the buffer is None, but its count is {count}: pass a buffer or count 0")
        if start < 0 or end > entries:
            raise InvalidUsageError(
                f"{name}: elements {start} to {end} are asked for, but the buffer holds {max(entries, 0)}"
                f"{' from its displacement on' if entries < self.entries else ''}: pass a larger buffer or other counts"
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
        dtype, derived = None if self.bottom else self.dtype, None
        if dtype is None and memory.on_device and self.mpi_type is not None:
            blocks = [(start, total)] if counts is None or displs is None else list(zip(displs, counts, strict=True))
            places = [(place * self.extent, n) for place, n in blocks]
            derived = elements_at(self.mpi_type, _room_of(memory, name, bottom=self.bottom), places)
        return Operand(
            name, pointer, dtype, count, total, counts, displs, memory.on_device, memory.device,
            memory.owner, self.mpi_type, _for_mpi(spec, memory), memory.by_address, derived, memory.nowhere,
        )  # fmt: skip
