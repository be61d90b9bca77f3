"""CopyStream: the stream on which the copies of a communicator run."""

from __future__ import annotations

from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.devices.cuda.beside_stream import ForkedStream
from mpicomm.devices.cuda.stream_order import Enqueue


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current."""

    def __init__(self) -> None:
        self._stream = ForkedStream()
        self._forked = 0  # the copies after a fork use it
        self.join = self._stream.join
        """Lets a stream wait for all enqueued copies."""

    def fork(self, stream: int) -> None:
        """Let all later copies wait for all work that is enqueued on ``stream``."""
        self._forked = self._stream.fork(stream)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._stream.close()

    def copying(self, copy: Copy) -> Enqueue:
        """Return the copy as a step of a plan."""
        return lambda stream: runtime.memcpyAsync(
            copy.target,
            copy.source,
            copy.nbytes,
            runtime.memcpyDeviceToDevice,
            stream if copy.local else self._forked,
        )
