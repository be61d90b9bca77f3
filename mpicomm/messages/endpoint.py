"""One buffer of a point-to-point call: read once, and for a device array with the stream of its copies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpicomm.errors import InvalidUsageError
from mpicomm.messages.device import MessageDevice
from mpicomm.mpi.arguments import Operand


# Not frozen: a frozen one takes longer to make, and each call on device arrays makes one.
@dataclass(slots=True, eq=False)
class Endpoint:
    """The buffer ``spec`` of a call of ``operation``."""

    operation: str
    spec: Any
    operand: Operand | None = None
    """What the buffer holds; None for host memory that MPI alone sends or receives."""
    device: MessageDevice | None = None
    """The device of the communicator; None where ``operand`` is."""
    stream: int | None = None
    """The stream that orders the copies of a device array; None for host memory."""
    captured: bool = False
    """Whether the stream captures a CUDA graph."""

    blocks: bool = False
    """Whether a blocking call waits for its copies, because no library says on which stream the caller's later work
    is."""

    @property
    def on_device(self) -> bool:
        """Whether the buffer is a device array."""
        return self.stream is not None

    def refuse_capture(self) -> None:
        """Raise `InvalidUsageError` where the stream captures a graph: MPI matches the message now, on the host."""
        if self.captured:
            raise InvalidUsageError(
                f"{self.operation} cannot be part of a CUDA graph, as MPI matches messages on the host: use Send, Recv "
                'or Sendrecv with algorithm="auto", or call it outside the capture'
            )
