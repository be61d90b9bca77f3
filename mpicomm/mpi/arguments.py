"""Operands: buffer arguments of MPI calls, read and checked, in all the forms that mpi4py takes (see `spec`).

Two things differ from mpi4py. A count beyond the end of the buffer is an error here. Where mpi4py raises KeyError,
BufferError or MPI.Exception, the error is also `InvalidUsageError`; where it raises OverflowError, it is only that.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy import ndarray

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import NOWHERE, ArrayMemory, any_overlap, array_of, is_host_view, read
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.layout import Elements, elements_at
from mpicomm.mpi.spec import (
    Shape,
    datatype_of,
    device_address,
    displacements,
    index_of,
    indices_of,
    is_sequence,
    items,
    no_type,
    typed_blocks,
    with_buffer,
)


@dataclass(frozen=True)
class Span:
    """``count`` consecutive elements at address ``pointer``."""

    pointer: int
    count: int


# The class is not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class Operand:
    """A buffer argument: its memory, the type of its elements, and the counts and displacements of its blocks."""

    name: str
    pointer: int
    """The address of element 0, with the displacement; in vector forms the start of the buffer."""
    on_device: bool
    device: int | None
    """The ordinal of the GPU; None on the host."""
    memory: ArrayMemory = field(repr=False)
    """The memory of the array."""
    spec: Any = field(repr=False)
    """The argument for MPI: as the caller passed it, or with the exported memory in place of the object."""
    dtype: np.dtype[Any] | None = None
    """None if only MPI can handle the argument: a derived datatype, ``MPI.BOTTOM``, or a format of a buffer."""
    mpi_type: MPI.Datatype | None = None
    """The datatype that the caller named."""
    count: int = 0
    """The elements of one block; in vector forms of all blocks."""
    total: int = 0
    """The elements of all blocks."""
    counts: tuple[int, ...] | None = None
    """The elements of each block in vector forms; else None."""
    displs: tuple[int, ...] | None = None
    """The start of each block in vector forms, in elements from ``pointer``; else None."""
    derived: tuple[Elements, ...] | None = None
    """The elements of a derived datatype in device memory, of each block in vector forms; else None."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements; 0 if ``dtype`` is None."""
        return 0 if self.dtype is None else self.total * self.dtype.itemsize

    @property
    def packed_nbytes(self) -> int:
        """The bytes of all elements, also of derived datatypes that kernels pack; 0 if only MPI knows them."""
        return self.nbytes if self.derived is None else sum(block.layout.nbytes for block in self.derived)

    @property
    def extents(self) -> list[tuple[int, int]]:
        """The addresses of the first byte and after the last byte of each block that has elements."""
        if self.derived is not None:
            derived = [(each.address, each.layout) for each in self.derived if each.layout.nbytes]
            return [(address + layout.begin, address + layout.end) for address, layout in derived]
        if self.dtype is None or self.total == 0:
            return []
        pointer, itemsize = self.pointer, self.dtype.itemsize
        if self.counts is None or self.displs is None:
            return [(pointer, pointer + self.total * itemsize)]
        blocks = zip(self.displs, self.counts, strict=True)
        return [(pointer + displ * itemsize, pointer + (displ + n) * itemsize) for displ, n in blocks if n]

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
    writable: bool,
    name: str,
    shape: Shape = "blocks",
    blocks: int = 1,
    memory: ArrayMemory | None = None,
    peer: str = "rank",
) -> Operand:
    """Read the argument ``name``. Local.

    ``blocks`` is the number of blocks in all shapes but "one" and "by_recvcounts", which are one block here. Errors say
    ``peer`` for the owner of a block. ``writable`` is for receive buffers. ``memory`` is the memory of the array, if
    the caller has read it already. The caller handles ``MPI.IN_PLACE``.

    In the shape "blocks" a count is the count of one block. Without a count the blocks share the elements evenly. In a
    "vector" the first blocks get one more of the elements that remain. There one integer as counts is the count of
    every block, and one integer as displacements is the distance between two blocks. Without displacements the blocks
    follow each other. In the shape "typed" displacements are in bytes, and MPI reads host memory itself.

    Raises `TypeError` for objects that are no buffers and for counts that are no integers, `InvalidUsageError` for all
    other faults.
    """
    buffer, counts, displs, datatype = items(spec, name, shape)
    if spec is buffer or not (buffer is None or buffer is MPI.BOTTOM):
        memory = memory or read(buffer, writable, name)
    elif datatype is None:
        raise InvalidUsageError(f"{name}: {buffer!r} as the buffer needs a datatype: [{buffer!r}, count, type]")
    elif buffer is MPI.BOTTOM:  # its addresses are addresses of a GPU or of the host
        found = device_address(spec)
        memory = ArrayMemory(0, 0, None, found is not None, found and found[1], by_address=found is not None)
    else:
        memory = memory or NOWHERE
    for_mpi = spec
    if memory.exported is not None and not memory.on_device:  # a second export would take as long again
        with suppress(InvalidUsageError):  # the engines may know a type that MPI lacks
            for_mpi = with_buffer(spec, memory.exported, memory.dtype)
    operand = Operand(name, memory.pointer, memory.on_device, memory.device, memory, for_mpi)
    if not memory.on_device and (shape == "typed" or (datatype is None and memory.dtype is None)):
        return operand  # MPI may know the type
    number = 1 if shape in ("one", "by_recvcounts") else blocks
    room = memory.pointer, memory.nbytes if memory.room is None else memory.room
    gpu = memory.device if buffer is MPI.BOTTOM else None
    if shape == "typed":
        operand.counts, operand.displs, datatypes = typed_blocks(spec, size=number, name=name, peer=peer)
        operand.count = operand.total = sum(operand.counts)
        typed = zip(datatypes, operand.displs, operand.counts, strict=True)
        operand.derived = tuple(elements_at(one, room, displ, n, name=name, gpu=gpu) for one, displ, n in typed)
        return operand
    elements = _Elements(memory, buffer, datatype, name, peer)
    operand.dtype, operand.mpi_type, extent = elements.dtype, elements.mpi_type, elements.extent
    if shape == "vector":
        operand.counts, operand.displs = elements.vector(counts, displs, number)
        operand.count = operand.total = sum(operand.counts)
        spans = [*zip(operand.displs, operand.counts, strict=True)]
    else:
        start, operand.count = elements.even(counts, displs, number)
        operand.total = operand.count * number
        operand.pointer += start * extent
        spans = [(start, operand.total)]
    datatype = operand.mpi_type
    if operand.on_device and datatype is not None and (operand.dtype is None or gpu is not None):
        in_bytes = [(start * extent, n) for start, n in spans]
        operand.derived = tuple(elements_at(datatype, room, displ, n, name=name, gpu=gpu) for displ, n in in_bytes)
    if buffer is MPI.BOTTOM:
        operand.dtype = None
    return operand


class _Elements:
    """The elements that a buffer holds, out of which counts and displacements cut blocks.

    Raises `InvalidUsageError` if they have no type.
    """

    def __init__(self, memory: ArrayMemory, buffer: Any, datatype: Any, name: str, peer: str) -> None:
        self.name, self.peer, self.buffer, self.nbytes = name, peer, buffer, memory.nbytes
        self.dtype: np.dtype[Any] | None = memory.dtype
        self.mpi_type: MPI.Datatype | None = None
        if datatype is not None:
            self.dtype, self.mpi_type = datatype_of(datatype, name)
        elif not types.is_plain(memory.dtype):
            raise no_type(memory, name)
        of_element: Any = self.mpi_type if self.dtype is None else self.dtype
        self.extent = extent = int(of_element.extent if self.dtype is None else of_element.itemsize)
        self.number, self.rest = divmod(memory.nbytes, extent) if extent > 0 else (0, 0)
        """The whole elements, and the bytes after the last one."""
        self.room = self.number if memory.room is None or extent <= 0 else memory.room // extent
        """The elements that counts may reach."""

    def even(self, count: Any, displ: Any, blocks: int) -> tuple[int, int]:
        """Return the first element, and the elements of each of ``blocks``."""
        name = self.name
        start = 0 if displ is None else index_of(displ, "displacement", name)
        number = (self.number if count is None else self.room) - start
        if start > 0:
            self._require_extent()
        if start < 0 or number < 0:
            raise InvalidUsageError(
                f"{name}: displacement {start} lies outside the buffer, which holds {self.number} elements"
            )
        if count is not None:
            count = index_of(count, "count", name)
            self._require_room(count, 0, blocks * count, number)
            return start, count
        self._require_whole()
        each, rest = divmod(number, max(blocks, 1))  # a rank without neighbours has no blocks
        if rest:
            raise InvalidUsageError(
                f"{name}: {number} elements are no multiple of {blocks}, one block for each {self.peer}: pass a count, "
                "or use the vector call (Allgatherv, Alltoallv, ...)"
            )
        return start, each

    def vector(self, counts: Any, displs: Any, blocks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the elements and the first element of each of ``blocks``."""
        name, peer = self.name, self.peer
        if counts is None:
            self._require_whole()
            share, more = divmod(self.number, max(blocks, 1))
            each = tuple(share + (rank < more) for rank in range(blocks))
        elif is_sequence(counts):
            each = indices_of(counts, blocks, "counts", name, peer)
        else:
            each = (index_of(counts, "count", name),) * blocks
        starts = (0, *accumulate(each))[:blocks] if displs is None else displacements(displs, blocks, name, peer)
        for n, start in zip(each, starts, strict=True):
            self._require_room(n, start, start + n, self.room)
        return each, starts

    def _require_extent(self) -> None:
        """Raise for a derived datatype with elements that do not follow each other."""
        if self.extent <= 0:
            raise InvalidUsageError(
                f"{self.name}: elements of a datatype with the extent {self.extent} cannot be counted: pass a count "
                "and no displacement"
            )

    def _require_whole(self) -> None:
        """Raise unless the buffer holds a whole number of elements."""
        if self.nbytes:
            self._require_extent()
        if self.rest:
            raise InvalidUsageError(
                f"{self.name}: {self.nbytes} bytes are no multiple of the {self.extent} bytes of an element: pass a "
                "count"
            )

    def _require_room(self, count: int, start: int, end: int, number: int) -> None:
        """Raise unless the elements from ``start`` to ``end`` are among the first ``number``."""
        name = self.name
        if count < 0:
            raise RefusedByMpiError(f"{name}: count {count} is negative: pass 0 or more", MPI.ERR_COUNT)
        if count and self.buffer is None:
            raise InvalidUsageError(f"{name}: the buffer is None, but its count is {count}: pass a buffer or count 0")
        # MPI.BOTTOM has no end, and only MPI knows how far elements of a derived datatype reach.
        unbounded = self.buffer is MPI.BOTTOM or self.dtype is None
        if count and not unbounded and (start < 0 or end > number):
            raise InvalidUsageError(
                f"{name}: elements {start} to {end} are asked for, but the buffer holds {max(number, 0)}"
                f"{' from its displacement on' if number < self.number else ''}: pass a larger buffer or other counts"
            )


def overlaps(a: Operand, b: Operand) -> bool:
    """Return whether two operands share memory; False if only MPI can handle one of them, because MPI checks it."""
    if a.dtype is None or b.dtype is None:
        return False
    return any_overlap([(*extent, owner) for owner, operand in enumerate((a, b)) for extent in operand.extents])


def require_disjoint(send: Operand, receive: Operand, *, reduction: bool = False) -> None:
    """Raise `RefusedByMpiError` if the two share memory. In a reduction both may be exactly the same memory."""
    if not overlaps(send, receive):
        return
    if reduction and send.pointer == receive.pointer and send.total == receive.total and send.dtype == receive.dtype:
        return
    raise RefusedByMpiError(
        f"{send.name} and {receive.name} overlap: pass MPI.IN_PLACE if the receive buffer already holds the data, or "
        "copy one of them",
        MPI.ERR_BUFFER,
    )


# The location of buffers: device memory, which MPI must not get, or host memory, which has no stream.


def is_on_device(spec: Any) -> bool:
    """Return whether a buffer argument, an array or a list with one, is a device array. Local.

    An object that is no buffer is no device array: MPI refuses it, or ignores it beside ``MPI.PROC_NULL``.
    """
    array = array_of(spec)
    if array is MPI.BOTTOM:
        return device_address(spec) is not None
    if _is_surely_on_host(array):
        return False
    try:
        return read(array, False, "buf").on_device
    except TypeError:
        return False


def parse_on_device(spec: Any, writable: bool, name: str) -> Operand | None:
    """Parse the argument ``name`` if it is a device array, and return None for host memory. Local.

    MPI reads arguments in host memory itself. Raises the errors of `parse`.
    """
    array = array_of(spec)
    if array is MPI.BOTTOM:
        return None if device_address(spec) is None else parse(spec, writable=writable, name=name)
    if _is_surely_on_host(array):
        return None
    memory = read(array, writable, name)
    return parse(spec, writable=writable, name=name, memory=memory) if memory.on_device else None


def _is_surely_on_host(array: Any) -> bool:
    if type(array) is ndarray:
        return array.base is None or is_host_view(array)
    return array is None or array is MPI.IN_PLACE


def require_same_device(what: str, device: int | None, expected: int | str) -> None:
    """Raise `InvalidUsageError` for an array on GPU ``device`` if the communicator is elsewhere. Local.

    Kernels and copies of the communicator's device may have no access to the array, and a stream of the other GPU
    orders its contents.
    """
    if device is not None and device != expected:
        place = "the cpu" if expected == "cpu" else f"GPU {expected}"
        raise InvalidUsageError(
            f"{what} is on GPU {device}, but this communicator is on {place}: copy it there, or create the "
            f"communicator with device={device}"
        )


def refuse_stream(operation: str, stream: Any) -> None:
    """Raise `InvalidUsageError` for a stream that the caller passes with host arrays."""
    if stream is not None:
        raise InvalidUsageError(
            f"{operation}: stream={stream!r} is for device arrays, and the buffers are host arrays: leave stream out"
        )
