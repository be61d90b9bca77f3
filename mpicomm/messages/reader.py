"""Reads each buffer of a call once: a contiguous device array by a short path, all other buffers by `parse`."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.messages.endpoint import Endpoint
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.mpi import host_calls, types
from mpicomm.mpi.arguments import Operand, is_on_device, parse, parse_on_device, require_same_device
from mpicomm.mpi.buffers import array_of
from mpicomm.mpi.descriptors import descriptor_of
from mpicomm.mpi.errors import BufferRefusedError

_EMPTY = np.empty(0, np.uint8)
LISTS = frozenset((list, tuple))
"""The classes of buffer specifications."""


def read(
    rendezvous: Rendezvous,
    operation: str,
    buf: Any,
    stream: Any,
    peer: int,
    name: str = "buf",
    *,
    receives: bool = False,
    other_peer: int = MPI.PROC_NULL,
    other_end: Endpoint | None = None,
) -> tuple[Any, Endpoint | None]:
    """Read the buffer ``name``. Return it with its endpoint, or with None for host memory that needs only MPI. Local.

    If all peers are MPI.PROC_NULL, an object that is no buffer becomes None, which stands for no memory. ``other_end``
    is the other buffer of the call. Raises the errors of `parse`, and the error of an earlier call.
    """
    end = read_plain(rendezvous, operation, buf, stream, other_end)
    if end is not None:
        return buf, end
    try:
        return buf, _parse(rendezvous, operation, buf, stream, name, receives=receives)
    except (TypeError, InvalidUsageError):
        if peer != MPI.PROC_NULL or other_peer != MPI.PROC_NULL or _is_device_array(buf):
            raise
    return None, _parse(rendezvous, operation, None, stream, name, receives=receives)


def read_plain(
    rendezvous: Rendezvous, operation: str, buf: Any, stream: Any, other_end: Endpoint | None = None
) -> Endpoint | None:
    """Read a plain device array, also in a list, on a stream that captures no graph. Return None for others. Local.

    ``other_end`` is as in `read`. Raises the error of an earlier call.
    """
    plain = descriptor_of(buf) if rendezvous.has_begun else None
    if plain is None or not plain[1] or len(plain) != 3:  # another buffer, or an empty array
        return None
    pointer, count, kind = plain
    array = buf
    if type(buf) in LISTS:
        array, kind = buf[0], kind[0]  # the kind also has the datatype
        if type(kind) is not tuple:  # of an address
            return None
    dtype, ordinal = kind
    device, nbytes = rendezvous.device, count * element_nbytes(dtype)
    if not nbytes or ordinal != device.device:
        return None
    if other_end is not None and other_end.operand is None and type(other_end.spec) is type(array):
        resolved = other_end.stream  # the arrays of one class have one current stream
    else:
        resolved = device.eager_stream(stream, array)
    if resolved is None:
        return None
    return Endpoint(operation, array, pointer, nbytes, resolved, device, True, completes=device.completes)


def _parse(
    rendezvous: Rendezvous, operation: str, buf: Any, stream: Any, name: str, *, receives: bool
) -> Endpoint | None:
    if receives and rendezvous.expects_headers:
        operand: Operand | None = parse_any(buf, True, name)
    else:
        operand = parse_on_device(buf, receives, name)
    if operand is None:
        return None
    device = rendezvous.device_for(operation)
    if not operand.on_device:
        return Endpoint(operation, host_calls.for_mpi(operand), device=device, operand=operand)
    require_same_device(f"{operation}: {operand.name}", operand.device, device.device)
    resolved = device.stream(stream, array_of(buf))
    return Endpoint(
        operation,
        buf,
        operand.pointer,
        operand.packed_nbytes,
        resolved,
        device,
        is_flat=operand.dtype is not None,
        operand=operand,
        captured=device.is_capturing(resolved),
        completes=device.completes or (operand.memory.by_address and stream is None),
    )


def parse_any(buf: Any, writable: bool, name: str) -> Operand:
    """Parse a buffer, or None, which stands for no memory beside MPI.PROC_NULL."""
    return parse(_EMPTY if buf is None else buf, writable=writable, name=name)


def host_endpoint(operation: str, buf: Any, writable: bool, name: str) -> Endpoint:
    """Read the host buffer ``name`` of a call that also has a device array. Raises the errors of `parse`.

    MPI would raise such errors only after the other half of the call has started.
    """
    return Endpoint(operation, host_calls.for_mpi(parse_any(buf, writable, name)))


@functools.cache
def element_nbytes(dtype: Any) -> int:
    """Return the bytes of an element of a type of CuPy or PyTorch; 0 for a type that messages do not have."""
    found = dtype if isinstance(dtype, np.dtype) else types.torch_dtype(dtype)
    return found.itemsize if found is not None and types.is_plain(found) else 0


def _is_device_array(buf: Any) -> bool:
    try:
        return is_on_device(buf)
    except BufferRefusedError:
        return False
