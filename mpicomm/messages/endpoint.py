"""One buffer of a point-to-point call, read once. A device array also has the stream of its copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from mpicomm.devices.base import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.derived import Elements
from mpicomm.mpi.plain_arrays import plain_array


# This is no dataclass, and callers pass its arguments by position, because each call on device arrays makes one.
class Endpoint:
    """The buffer ``spec`` of a call of ``operation``. The kind of buffer decides the way of its message."""

    __slots__ = (
        "blocks",
        "captured",
        "device",
        "is_flat",
        "nbytes",
        "operand",
        "operation",
        "pointer",
        "spec",
        "stream",
    )

    def __init__(
        self,
        operation: str,
        spec: Any,
        pointer: int = 0,
        nbytes: int = 0,
        stream: int | None = None,
        device: GpuBackend | None = None,
        is_flat: bool = False,
        operand: Operand | None = None,
        captured: bool = False,
        blocks: bool = False,
    ) -> None:
        self.operation = operation
        self.spec = spec
        self.pointer = pointer
        """The address of the bytes of a flat buffer."""
        self.nbytes = nbytes
        """The bytes of its elements; 0 if only MPI knows them."""
        self.stream = stream
        """The stream that orders the copies of a device array; None for host memory."""
        self.device = device
        """The device of the communicator; None for host memory that only MPI sends or receives."""
        self.is_flat = is_flat
        """Whether it is a device array with bytes that follow each other."""
        self.operand = operand
        """The elements of the buffer; None if `read_plain` has read it, or if it is host memory that only MPI uses."""
        self.captured = captured
        """Whether the stream captures a CUDA graph."""
        self.blocks = blocks
        """Whether a blocking call waits for its copies, because the stream of the caller's later work is unknown."""

    @property
    def elements(self) -> Elements:
        """The elements of a derived datatype in device memory, which kernels pack."""
        assert self.operand is not None and self.operand.derived is not None
        return self.operand.derived[0]

    @property
    def on_device(self) -> bool:
        """Whether the buffer is a device array."""
        return self.stream is not None


def refused_capture(endpoint: Endpoint) -> InvalidUsageError:
    """Return the error of a call in a capture, because MPI matches the message now, on the host."""
    return InvalidUsageError(
        f"{endpoint.operation} cannot be part of a CUDA graph, because MPI matches messages on the host: use Send, "
        'Recv or Sendrecv with algorithm="auto", or call it outside the capture'
    )


def read_plain(
    operation: str, array: Any, stream: Any, device: GpuBackend, beside: Endpoint | None = None
) -> Endpoint | None:
    """Read a contiguous array of CuPy or PyTorch on ``device`` with few calls of Python; else return None. Local.

    It also returns None if the stream captures a graph. Raises the error of an earlier call. ``beside`` is the other
    buffer of the call.
    """
    plain = None if type(array) in _SPECIFICATIONS else plain_array(array)
    if plain is None or not plain[1]:  # no array, or an empty one
        return None
    pointer, count, (dtype, ordinal) = plain  # type: ignore[misc]
    element_nbytes = _element_nbytes(dtype)
    if ordinal != device.device or not element_nbytes:
        return None
    if beside is not None and beside.operand is None and type(beside.spec) is type(array):
        resolved = beside.stream  # the arrays of one class have one current stream
    else:
        resolved = device.eager_stream(stream, array)
    if resolved is None:
        return None
    return Endpoint(operation, array, pointer, count * element_nbytes, resolved, device, True)


_SPECIFICATIONS = frozenset((list, tuple))


@functools.cache
def _element_nbytes(dtype: Any) -> int:
    """Return the bytes of an element of a type of CuPy or PyTorch; 0 for a type that messages do not have."""
    found = dtype if isinstance(dtype, np.dtype) else types.torch_dtype(dtype)
    return found.itemsize if found is not None and types.is_plain(found) else 0
