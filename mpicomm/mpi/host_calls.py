"""MPI's calls on host memory: pinned copies of device arrays, and bytes in place of element types that MPI lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.devices.cuda.types import Backend, GpuBackend
from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.log import log_once, logger, report_slow_path
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, parse, require_same_device
from mpicomm.mpi.buffers import ArrayMemory, array_of, read
from mpicomm.mpi.spec import require_host_addresses, with_buffer

Result = TypeVar("Result")

REFUSALS = (BufferError, KeyError)
"""mpi4py's errors for elements and formats that it does not know."""


def for_mpi(operand: Operand) -> Any:
    """Return the argument with which MPI moves an operand: as bytes if mpi4py has no type for its elements.

    Device memory becomes a buffer that names its address, which `HostCopies` takes.
    """
    dtype = operand.dtype
    if dtype is None:
        return operand.spec
    by_name = operand.mpi_type is None and isinstance(operand.spec, (list, tuple)) and type(operand.spec[-1]) is str
    if types.mpi_datatype(dtype) is not None and not by_name:  # mpi4py does not know names such as "float64"
        return operand.spec
    nbytes = max((end for _, end in operand.extents), default=operand.pointer) - operand.pointer
    if operand.on_device:
        memory: Any = MPI.memory.fromaddress(operand.pointer, nbytes)
    else:
        memory = array_at(operand.pointer, nbytes, np.dtype(np.uint8), operand.memory.owner)
    if operand.counts is None or operand.displs is None:
        return [memory, MPI.BYTE]
    counts, displs = ([n * dtype.itemsize for n in numbers] for numbers in (operand.counts, operand.displs))
    return [memory, counts, displs, MPI.BYTE]


def as_bytes(spec: Any, writable: bool, name: str) -> Any:
    """Return the host argument ``name``, which mpi4py has refused, as bytes if MPI lacks its type. Local.

    Raises the errors of `parse`.
    """
    return for_mpi(parse(spec, writable=writable, name=name))


def call(
    method: Callable[..., Result], called: MPI.Intracomm | MPI.Message, *arguments: Any, receives: int | None = None
) -> Result:
    """Call mpi4py's ``method`` of ``called``, whose first argument is a host buffer; if mpi4py refuses it, as bytes.

    ``receives`` is the index of the receive buffer: 0, or that of a second buffer. Raises MPI's errors, and those of
    `as_bytes`.
    """
    try:
        return method(called, *arguments)
    except REFUSALS:
        given = [*arguments]
    for index in sorted({0, receives or 0}):
        name = ("recvbuf" if index else "sendbuf") if receives else "buf"
        ignored = receives and given[index + 1] == MPI.PROC_NULL  # MPI ignores one of two buffers
        given[index] = None if ignored else as_bytes(given[index], index == receives, name)
    return method(called, *given)


class HostCopies:
    """The pinned host copies of one call's device buffers, made in the order of one stream."""

    def __init__(self, backend: Backend, stream: int) -> None:
        self._backend, self._stream = backend, stream
        self.staged: list[tuple[ArrayMemory, npt.NDArray[np.uint8], bool]] = []
        """Each device buffer, its copy in pinned host memory, and whether the call writes it."""

    def stage(self, spec: Any, *, writable: bool, name: str, operand: Operand | None = None) -> Any:
        """Return the argument ``name`` for MPI: ``spec`` itself, or with a pinned copy in place of its device array.

        The copy is enqueued, and holds the data after `wait`. ``operand`` is the argument after `parse`. With it the
        copy holds all elements, which may reach beyond the bytes of an address, and the result may name a type that MPI
        lacks, for mapped memory. Without it such a type raises `InvalidUsageError`, and so does an array of another
        GPU.
        """
        array = array_of(spec)
        if array is None or array is MPI.IN_PLACE:
            return spec
        if array is MPI.BOTTOM:
            require_host_addresses(spec, name)
            return spec
        memory = read(array, writable, name)
        if not memory.on_device:
            return spec
        require_same_device(name, memory.device, self._backend.device)
        if operand is not None and memory.room is not None:
            memory.nbytes = max([memory.nbytes, *(end - memory.pointer for _, end in operand.extents)])
        host = self._backend.pinned(memory.nbytes)
        try:
            copied = with_buffer(spec, host, memory.dtype, by_name=operand is not None)
        except InvalidUsageError as error:
            raise InvalidUsageError(
                f"{name}: {error}, and only MPI can carry out this call: convert it, or move it as bytes with "
                "[buffer, MPI.BYTE]"
            ) from None
        self._fill(memory, host)
        self.staged.append((memory, host, writable))
        return copied

    def refresh(self, stream: int) -> None:
        """Copy all device buffers again, on ``stream``. The copies hold the data after `wait`."""
        self._stream = stream
        for memory, host, _ in self.staged:
            self._fill(memory, host)

    def _fill(self, memory: ArrayMemory, host: npt.NDArray[np.uint8]) -> None:
        # The copy includes receive buffers, because elements that MPI does not write, such as the gaps of a Gatherv,
        # must come back unchanged.
        self._backend.copy(host.ctypes.data, memory.pointer, memory.nbytes, self._stream)

    def wait(self) -> None:
        """Wait until the copies hold the data. Blocking."""
        self._backend.synchronize(self._stream)

    def copy_back(self) -> None:
        """Copy the receive buffers to the device. Blocking, because the pinned memory is released afterwards."""
        for memory, host, written in self.staged:
            if written:
                self._backend.copy(memory.pointer, host.ctypes.data, memory.nbytes, self._stream)
        self._backend.synchronize(self._stream)


NEEDS_MPI = "MPI carries it out on the host: call it outside the capture"
NEEDS_HOST_COPY = (
    "the host copies the host array beside an array on a GPU: pass arrays on the GPU, or call it outside the capture"
)
"""Why `require_no_capture` refuses a call by MPI, or one with host arrays beside device arrays; and the way out."""


def require_no_capture(operation: str, backend: GpuBackend, stream: int, reason: str) -> None:
    """Raise `InvalidUsageError` if ``stream`` captures a CUDA graph. ``reason`` says why, and the way out. Local."""
    if backend.is_capturing(stream):
        raise InvalidUsageError(f"{operation} cannot be part of a CUDA graph, because {reason}")


def log_host_staging(operation: str, reason: str) -> None:
    """Log once per operation and reason, at INFO, that a call on device arrays is staged through host memory."""
    path = f"through pinned host memory and MPI: {reason}"
    report_slow_path(path)
    log_once(logger.info, f"{operation} on device arrays goes {path}")


def warn_of_host_array(operation: str) -> None:
    """Warn once per operation of a host array beside a device array, which makes the call slow. Local."""
    reason = "a host array beside an array on a GPU goes through pinned memory"
    report_slow_path(reason)
    log_once(logger.warning, f"{operation}: {reason}, which is slower")


def out_of_place(receive: Any, counts: Sequence[int], rank: int) -> tuple[Any, Any]:
    """Return arguments that are not in place for a Reduce_scatter on host memory: a copy of the input, and the memory.

    With a derived datatype it stays in place.
    """
    operand = parse(receive, writable=True, name="recvbuf")
    datatype = None if operand.dtype is None else types.mpi_datatype(operand.dtype)
    if operand.dtype is None or datatype is None:
        return MPI.IN_PLACE, receive
    memory = array_at(operand.pointer, operand.total, operand.dtype)
    return [memory.copy(), datatype], [memory[: counts[rank]], datatype]
