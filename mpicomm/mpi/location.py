"""Where the buffers of a call lie: in device memory, which MPI must not see, or in host memory, which has no stream.

Device memory is the memory of the communicator's GPU.
"""

from __future__ import annotations

from typing import Any

from mpi4py import MPI
from numpy import ndarray

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.buffers import array_of, is_host_view, read
from mpicomm.mpi.spec import device_address

_bottom = MPI.BOTTOM
_in_place = MPI.IN_PLACE


def is_on_device(spec: Any) -> bool:
    """Return whether a buffer argument, an array or a specification with one, is a device array. Local.

    An object that is no buffer is no device array: MPI refuses it, or ignores it beside ``MPI.PROC_NULL``.
    """
    array = array_of(spec)
    if array is _bottom:
        return device_address(spec) is not None
    if _is_plainly_host(array):
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
    if array is _bottom:
        return None if device_address(spec) is None else parse(spec, writable=writable, name=name)
    if _is_plainly_host(array):
        return None
    memory = read(array, writable, name)
    return parse(spec, writable=writable, name=name, memory=memory) if memory.on_device else None


def _is_plainly_host(array: Any) -> bool:
    if type(array) is ndarray:
        return array.base is None or is_host_view(array)
    return array is None or array is _in_place


def require_here(what: str, device: int | None, here: int | str) -> None:
    """Raise `InvalidUsageError` for an array on GPU ``device`` if the communicator is on GPU ``here``. Local.

    Kernels and copies of ``here`` may have no access to the array, and a stream of the other GPU orders its contents.
    """
    if device is not None and device != here:
        raise InvalidUsageError(
            f"{what} is on GPU {device}, but this communicator is on GPU {here}: copy it there, or create the "
            f"communicator with device={device}"
        )


def refuse_stream(operation: str, stream: Any) -> None:
    """Raise `InvalidUsageError` for a stream that the caller passes with host arrays."""
    if stream is not None:
        raise InvalidUsageError(
            f"{operation}: stream={stream!r} is for device arrays, and the buffers are host arrays: leave stream out"
        )
