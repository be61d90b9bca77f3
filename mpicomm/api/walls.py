"""Messages to and from ``MPI.PROC_NULL``: MPI ignores their buffers, also objects that are no buffers."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.messages.calls import Messages
from mpicomm.messages.endpoint import Endpoint, read_plain
from mpicomm.mpi.buffers import BufferRefusedError
from mpicomm.mpi.location import is_on_device

_NOBODY = MPI.PROC_NULL


def read_end(
    messages: Messages,
    operation: str,
    buf: Any,
    stream: Any,
    peer: int,
    name: str = "buf",
    *,
    receives: bool = False,
    other: int = _NOBODY,
    beside: Endpoint | None = None,
) -> tuple[Any, Endpoint | None]:
    """Read a buffer of a call. Return the buffer with its endpoint, or with None for host memory. Local.

    If all peers are MPI.PROC_NULL, an object that is no buffer becomes None, which stands for no memory. ``beside`` is
    the other buffer of the call. Raises the errors of `Messages.sending` and `Messages.receiving`.
    """
    made = messages.memory.made
    plain = None if made is None else read_plain(operation, buf, stream, made.device, beside)
    if plain is not None:
        return buf, plain
    read = messages.receiving if receives else messages.sending
    try:
        return buf, read(operation, buf, stream, name)
    except (TypeError, InvalidUsageError):
        if peer != _NOBODY or other != _NOBODY or _is_device_array(buf):
            raise
    return None, read(operation, None, stream, name)


def _is_device_array(buf: Any) -> bool:
    try:
        return is_on_device(buf)
    except BufferRefusedError:
        return False
