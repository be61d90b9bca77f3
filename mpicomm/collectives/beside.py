"""Host arrays beside device arrays in a call on GPUs: kernels read and write pinned copies of the host arrays.

Each call allocates its own pinned memory, so calls on several streams cannot overwrite each other's data.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.log import logger, tell_slow_way
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.buffers import ArrayMemory, array_of, read
from mpicomm.mpi.host_calls import require_no_graph
from mpicomm.mpi.layout import Elements
from mpicomm.mpi.location import is_on_device
from mpicomm.session import Session

Reread = Callable[..., Operand]
"""Reads an argument again, as if it were in the given ``memory``."""

BESIDE = (
    "the host copies the host array beside an array on a GPU: pass arrays on the GPU, or call it outside the capture"
)
"""The reason of `require_no_graph` for calls with host arrays beside device arrays, and the way out."""
_ALIGNED_NBYTES = 16


def for_kernels(operand: Operand, reread: Reread, copies: PinnedCopies | None, *, written: bool) -> Operand:
    """Return a host operand as kernels see it. Its elements, if it has some, lie in ``copies``.

    Local. Raises `InvalidUsageError` for ``MPI.BOTTOM`` with addresses of the host.
    """
    if operand.dtype is not None:
        made = replace(operand, on_device=True)
    else:
        array = array_of(operand.spec)
        if array is MPI.BOTTOM:
            raise InvalidUsageError(
                f"{operand.name}: MPI.BOTTOM with addresses of the host, beside an array on a GPU: pass the array "
                "itself, and displacements from its start"
            )
        memory = ArrayMemory(0, 0, None, False, None, None) if array is None else read(array, written, operand.name)
        memory.on_device = True
        made = reread(memory=memory)
    extents = made.extents
    if copies is None or not extents:
        return made
    return copies.add(made, min(begin for begin, _ in extents), max(end for _, end in extents), written=written)


class PinnedCopies:
    """The pinned copies of the host arrays of one call. ``arguments`` are the buffers of the call."""

    def __init__(self, session: Session, operation: str, arguments: Sequence[Any], stream: Any) -> None:
        self._session = session
        self._operation = operation
        self._arguments = arguments
        self._stream = stream
        self._copies: list[tuple[int, npt.NDArray[np.uint8], bool, Any]] = []
        """The address of each copied array, its copy, whether it receives, and the object that keeps it alive."""

    def __bool__(self) -> bool:
        return bool(self._copies)

    def add(self, operand: Operand, begin: int, end: int, *, written: bool) -> Operand:
        """Copy the memory from ``begin`` to ``end``, which holds an operand's elements; return the operand in the copy.

        Local. The copy includes memory that receives, because the gaps between its elements must come back unchanged.
        Raises `InvalidUsageError` in a capture.
        """
        backend = self._session.gpu(self._operation)
        arrays = [each for each in self._arguments if each is not MPI.IN_PLACE and is_on_device(each)]
        stream = backend.stream(self._stream, array_of(arrays[0]) if arrays else None)
        require_no_graph(self._operation, backend, stream, BESIDE)  # before CUDA allocates, which a capture forbids
        warn_of_host_array(self._operation)
        shift = begin % _ALIGNED_NBYTES  # the elements keep their alignment, because kernels rely on it
        memory = backend.pinned(end - begin + shift)[shift:]
        ctypes.memmove(memory.ctypes.data, begin, end - begin)
        self._copies.append((begin, memory, written, operand.owner))
        by = memory.ctypes.data - begin
        derived = operand.derived and tuple(Elements(each.address + by, each.layout) for each in operand.derived)
        device = self._session.placement.here.device
        assert isinstance(device, int)
        return replace(operand, pointer=operand.pointer + by, derived=derived, device=device)

    def back(self) -> None:
        """Copy the results to the host arrays. The call must be over."""
        for pointer, memory, written, _ in self._copies:
            if written:
                ctypes.memmove(pointer, memory.ctypes.data, memory.nbytes)


_warned: set[str] = set()


def warn_of_host_array(operation: str) -> None:
    """Log once per operation that a call with a host array beside a device array is slow. Local."""
    reason = "a host array beside an array on a GPU goes through pinned memory"
    tell_slow_way(reason)
    if operation not in _warned:
        _warned.add(operation)
        logger.warning("%s: %s, which is slower", operation, reason)
