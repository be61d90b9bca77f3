"""Counts on the device: the buffers of an Alltoallv whose counts are integer arrays on the GPU.

The host never learns these counts. The call reads the counts of its ``sendbuf`` in stream order, and writes the counts
of its ``recvbuf``. Each buffer has room for the most elements that may come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.buffers import ArrayMemory, read
from mpicomm.mpi.spec import displacements, items, parts_of

_TYPES = ("int32", "int64")


@dataclass(frozen=True)
class DeviceCountsBuffer:
    """A buffer with a block for each rank."""

    operand: Operand
    """The whole buffer."""
    counts: ArrayMemory
    """The memory of an integer for each rank."""
    displs: ArrayMemory | tuple[int, ...] | None
    """The start of each block, in elements; None if each block follows the block before."""

    def indices(self) -> list[ArrayMemory]:
        """Return the memory of counts and displacements on the device."""
        return [each for each in (self.counts, self.displs) if isinstance(each, ArrayMemory)]


@dataclass(frozen=True)
class DeviceCounts:
    """Both buffers of a call with counts on the device."""

    send: DeviceCountsBuffer
    receive: DeviceCountsBuffer

    @property
    def itemsize(self) -> int:
        """The bytes of an element, the same in both buffers."""
        assert self.send.operand.dtype is not None
        return self.send.operand.dtype.itemsize


def is_wide(indices: ArrayMemory) -> bool:
    """Return whether counts or displacements on the device have 64 bits."""
    return indices.dtype == np.int64


def read_device_counts(send: Any, receive: Any, *, size: int, algorithm: str) -> DeviceCounts | None:
    """Return the buffers of an Alltoallv if any of its counts or displacements are on the GPU, else None. Local.

    Raises `InvalidUsageError` for counts on the GPU beside counts in host memory, for counts that are no integers or
    too few, and for buffers that kernels cannot carry.
    """
    on_device = [name for spec, name in ((send, "sendbuf"), (receive, "recvbuf")) if has_device_counts(spec)]
    if not on_device:
        return None
    if algorithm == "mpi":
        raise InvalidUsageError(
            f'Alltoallv: {on_device[0]} has counts on the GPU, which MPI cannot read: leave algorithm="mpi" out, or '
            "pass counts in host memory"
        )
    sent = _buffer(send, size=size, writable=False, name="sendbuf", beside=on_device[0])
    received = _buffer(receive, size=size, writable=True, name="recvbuf", beside=on_device[0])
    types = sent.operand.dtype, received.operand.dtype
    if types[0] is None or types[1] is None or types[0].itemsize != types[1].itemsize:
        raise InvalidUsageError(
            f"Alltoallv: sendbuf has elements of {types[0]}, recvbuf of {types[1]}: pass elements of one size if "
            "counts are on the GPU"
        )
    room = received.operand.total
    if not is_wide(received.counts) and room > np.iinfo(np.int32).max:
        raise InvalidUsageError(
            f"Alltoallv: recvbuf holds {room} elements, more than its counts of type int32 can say: pass "
            "counts of type int64"
        )
    _require_apart(sent, received)
    return DeviceCounts(sent, received)


def has_device_counts(spec: Any) -> bool:
    """Return whether counts or displacements of a buffer argument are an array on a GPU. Local."""
    parts = parts_of(spec) if isinstance(spec, (list, tuple)) else None
    return parts is not None and any(_is_on_device(each) for each in parts[1:3])


def _is_on_device(numbers: Any) -> bool:
    """Return whether counts or displacements are an array on a GPU."""
    if numbers is None or isinstance(numbers, (int, list, tuple, np.ndarray, np.integer)):
        return False
    try:
        return read(numbers, False, "counts").on_device
    except (TypeError, InvalidUsageError):  # other objects are read as counts in host memory
        return bool(getattr(numbers, "is_cuda", False)) or hasattr(numbers, "__cuda_array_interface__")


def _buffer(spec: Any, *, size: int, writable: bool, name: str, beside: str) -> DeviceCountsBuffer:
    if spec is MPI.IN_PLACE or spec is None:
        raise InvalidUsageError(f"Alltoallv: {name}=MPI.IN_PLACE beside counts on the GPU: pass a separate buffer")
    buffer, counts, displs, datatype = items(spec, name, "vector")
    if not _is_on_device(counts):
        shown = "missing" if counts is None else f"{counts!r} in host memory"
        also = "" if beside == name else f", and {beside} has counts on the GPU"
        raise InvalidUsageError(
            f"Alltoallv: the counts of {name} are {shown}{also}: pass an integer array on the GPU, of {size} items"
            f"{', into which the call writes the counts' if writable else ''}"
        )
    operand = parse([buffer, datatype] if datatype is not None else buffer, writable=writable, name=name)
    if not operand.on_device:
        raise InvalidUsageError(
            f"Alltoallv: {name} is in host memory, and its counts are on the GPU: pass both on the GPU, or both in "
            "host memory"
        )
    if operand.dtype is None:
        raise InvalidUsageError(
            f"Alltoallv: {name} has a derived datatype beside counts on the GPU: pass a predefined datatype, or counts "
            "in host memory"
        )
    starts: ArrayMemory | tuple[int, ...] | None = None
    if _is_on_device(displs):
        starts = _indices(displs, size, f"the displacements of {name}", operand, writable=False)
    elif displs is not None:
        starts = displacements(displs, size, name, "rank")
    return DeviceCountsBuffer(
        operand, _indices(counts, size, f"the counts of {name}", operand, writable=writable), starts
    )


def _indices(array: Any, size: int, what: str, operand: Operand, *, writable: bool) -> ArrayMemory:
    memory = read(array, writable, what)
    if memory.dtype is None or memory.dtype.name not in _TYPES:
        raise InvalidUsageError(f"Alltoallv: {what} have type {memory.dtype}: pass {' or '.join(_TYPES)}")
    number = memory.nbytes // memory.dtype.itemsize
    if number != size:
        raise InvalidUsageError(f"Alltoallv: {what} are {number} integers for {size} ranks: pass one for each rank")
    if memory.device != operand.device:
        raise InvalidUsageError(
            f"Alltoallv: {what} are on GPU {memory.device}, and {operand.name} is on GPU {operand.device}: pass both "
            "on one GPU"
        )
    return memory


def _require_apart(send: DeviceCountsBuffer, receive: DeviceCountsBuffer) -> None:
    """Raise if the call would write into an array that it reads."""
    data, output = send.operand, receive.operand
    arrays = [(data.pointer, data.nbytes, "sendbuf")]
    arrays += [(each.pointer, each.nbytes, "counts or displacements of sendbuf") for each in send.indices()]
    arrays += [(each.pointer, each.nbytes, "displacements of recvbuf") for each in receive.indices()[1:]]
    for start, length, name in (
        (output.pointer, output.nbytes, "recvbuf"),
        (receive.counts.pointer, receive.counts.nbytes, "the counts of recvbuf"),
    ):
        for other, nbytes, its_name in arrays:
            if length and nbytes and start < other + nbytes and other < start + length:
                raise InvalidUsageError(f"Alltoallv: {name} and {its_name} overlap: copy one of them")
        arrays.append((start, length, name))
