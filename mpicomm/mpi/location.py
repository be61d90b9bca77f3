"""Whether the buffers of a call are device arrays, which MPI must not see, or host memory, which has no streams."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.buffers import array_of, read


def is_on_device(spec: Any) -> bool:
    """Return whether a buffer argument, an array or a specification with one, is a device array. Local."""
    array = array_of(spec)
    if type(array) is np.ndarray or array is None or array is MPI.BOTTOM or array is MPI.IN_PLACE:
        return False
    return read(array, False, "buf").on_device


def refuse_stream(operation: str, stream: Any) -> None:
    """Raise `InvalidUsageError` for a stream that is given with host arrays."""
    if stream is not None:
        raise InvalidUsageError(f"{operation}: stream={stream!r} is for device arrays: calls on host arrays block")
