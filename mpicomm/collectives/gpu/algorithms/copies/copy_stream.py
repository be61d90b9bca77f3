"""CopyStream: the stream on which the copies of a communicator run."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.devices.cuda.beside_stream import BesideStream
from mpicomm.devices.cuda.stream_order import Enqueue


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current."""

    def __init__(self) -> None:
        self._beside = BesideStream()
        self._forked = 0  # the stream of the last fork; the copies and the join after the fork use it
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def fork(self, stream: int) -> None:
        """Let all later copies wait for all work that is enqueued on ``stream``."""
        self._forked = self._beside.of(stream)
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._forked, self._fork.ptr)

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all enqueued copies."""
        runtime.eventRecord(self._join.ptr, self._forked)
        runtime.streamWaitEvent(stream, self._join.ptr)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._fork = self._join = None
        self._beside.close()

    def copying(self, copy: Copy) -> Enqueue:
        """Return the copy as a step of a plan."""
        return lambda stream: runtime.memcpyAsync(
            copy.target,
            copy.source,
            copy.nbytes,
            runtime.memcpyDeviceToDevice,
            stream if copy.local else self._forked,
        )
