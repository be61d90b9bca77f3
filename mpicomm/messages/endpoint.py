"""One buffer of a point-to-point call, read once. A device array also has the stream of its copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.layout import Elements


# It is not frozen, and callers pass its arguments by position, because each call on device arrays makes one.
@dataclass(slots=True, eq=False)
class Endpoint:
    """The buffer ``spec`` of a call of ``operation``. The kind of the buffer decides how its message travels."""

    operation: str
    spec: Any
    pointer: int = 0
    """The address of the bytes of a flat buffer."""
    nbytes: int = 0
    """The bytes of its elements; 0 if only MPI knows them."""
    stream: int | None = None
    """The stream that orders the copies of a device array; None for host memory."""
    device: GpuBackend | None = None
    """The device of the communicator; None for host memory that only MPI sends or receives."""
    is_flat: bool = False
    """Whether it is a device array whose bytes follow each other."""
    operand: Operand | None = None
    """The elements of the buffer; None for a plain array, and for host memory that only MPI uses."""
    captured: bool = False
    """Whether the stream captures a CUDA graph."""
    completes: bool = False
    """Whether a blocking call is complete on return: an address names no stream, or calls complete on all streams."""

    @property
    def elements(self) -> Elements:
        """The elements of a derived datatype in device memory, which kernels pack."""
        assert self.operand is not None and self.operand.derived is not None
        return self.operand.derived[0]

    @property
    def on_device(self) -> bool:
        """Whether the buffer is a device array."""
        return self.stream is not None


def capture_error(endpoint: Endpoint) -> InvalidUsageError:
    """Return the error of a call in a capture, because MPI matches the message now, on the host."""
    return InvalidUsageError(
        f"{endpoint.operation} cannot be part of a CUDA graph, because MPI matches messages on the host: use Send, "
        'Recv or Sendrecv with algorithm="auto", or call it outside the capture'
    )
