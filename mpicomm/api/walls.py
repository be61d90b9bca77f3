"""Messages to and from ``MPI.PROC_NULL``, whose buffers MPI ignores, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.messages.endpoint import Endpoint
from mpicomm.mpi.buffers import BufferRefusedError
from mpicomm.mpi.location import is_on_device

_NOBODY = MPI.PROC_NULL


def read_end(
    read: Callable[..., Endpoint | None],
    operation: str,
    buf: Any,
    stream: Any,
    peer: int,
    name: str = "buf",
    *,
    other: int = _NOBODY,
) -> tuple[Any, Endpoint | None]:
    """Read a buffer with ``read``, a method of `Messages`; return the buffer and its endpoint. Local.

    Where the peers are nobody, an object that is no buffer is None, which stands for no memory. Raises as ``read``.
    """
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
