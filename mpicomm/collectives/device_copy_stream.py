"""CopyStream: where the copies of a communicator run, beside its kernels."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.backend.cuda_order import Enqueue
from mpicomm.collectives.device_copies import Copy


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current."""

    def __init__(self) -> None:
        self._stream: Any = cupy.cuda.Stream(non_blocking=True)
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def fork(self, stream: int) -> None:
        """Let what is copied from here on wait for what ``stream`` has been given so far."""
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._stream.ptr, self._fork.ptr)

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all copies so far."""
        runtime.eventRecord(self._join.ptr, self._stream.ptr)
        runtime.streamWaitEvent(stream, self._join.ptr)

    def close(self) -> None:
        """Destroy the stream and its events. A second call does nothing."""
        self._stream = self._fork = self._join = None

    def copying(self, copy: Copy) -> Enqueue:
        """Return the copy as a step of a plan."""
        return lambda stream: runtime.memcpyAsync(
            copy.target,
            copy.source,
            copy.nbytes,
            runtime.memcpyDeviceToDevice,
            stream if copy.local else self._stream.ptr,
        )
