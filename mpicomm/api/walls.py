"""Messages to and from ``MPI.PROC_NULL``, whose buffers MPI ignores, whatever they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.messages.endpoint import Endpoint

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

    Where the peers are nobody, a buffer that cannot be read is None, which stands for no memory. Raises as ``read``.
    """
    try:
        return buf, read(operation, buf, stream, name)
    except (TypeError, InvalidUsageError):
        if peer != _NOBODY or other != _NOBODY:
            raise
    return None, read(operation, None, stream, name)
