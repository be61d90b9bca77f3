"""CopyStream: where the copies of a communicator run, beside its kernels."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.devices.cuda.capture import capture_of, relaxed, takes_part
from mpicomm.devices.cuda.stream_order import Enqueue


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current.

    In a capture it is another one: a stream that was forked into a capture remains part of it, though it has joined
    again, until that ends, and can neither run anything nor be forked into another capture before. Streams of captures
    that are over are used again, so that there are no more of them than captures that were open at once.
    """

    def __init__(self) -> None:
        self._eager: Any = cupy.cuda.Stream(non_blocking=True)
        self._captured: dict[int, Any] = {}  # by the captures that they were forked into last
        self._forked = 0  # the one of the last fork, which all that follows in a plan is for
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def fork(self, stream: int) -> None:
        """Let what is copied from here on wait for what ``stream`` has been given so far."""
        self._forked = self._captured_beside(stream) if runtime.streamIsCapturing(stream) else self._eager.ptr
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._forked, self._fork.ptr)

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all copies so far."""
        runtime.eventRecord(self._join.ptr, self._forked)
        runtime.streamWaitEvent(stream, self._join.ptr)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._eager = self._fork = self._join = None
        self._captured.clear()

    def copying(self, copy: Copy) -> Enqueue:
        """Return the copy as a step of a plan."""
        return lambda stream: runtime.memcpyAsync(
            copy.target,
            copy.source,
            copy.nbytes,
            runtime.memcpyDeviceToDevice,
            stream if copy.local else self._forked,
        )

    def _captured_beside(self, stream: int) -> int:
        """Return the stream for copies of the capture that ``stream`` takes part in."""
        capture = capture_of(stream)
        if capture not in self._captured:
            over = next((each for each, beside in self._captured.items() if not takes_part(beside.ptr)), None)
            if over is not None:
                self._captured[capture] = self._captured.pop(over)
            else:
                with relaxed():
                    self._captured[capture] = cupy.cuda.Stream(non_blocking=True)
        pointer: int = self._captured[capture].ptr
        return pointer
