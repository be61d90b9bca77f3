"""CopyStream: the stream on which the copies of a communicator run."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.devices.cuda.capture import capture_of, relaxed, takes_part
from mpicomm.devices.cuda.stream_order import Enqueue


class CopyStream:
    """The stream on which a communicator's copies run beside its kernels. The device must be current.

    Each capture has another stream. A stream that was forked into a capture remains part of that capture until the
    capture ends, even if it has joined again. Until then it can neither run anything nor be forked into another
    capture. Streams of captures that are over are used again, so that there are no more streams than captures that were
    open at once.
    """

    def __init__(self) -> None:
        self._eager: Any = cupy.cuda.Stream(non_blocking=True)
        self._captured: dict[int, Any] = {}  # by the captures that they were forked into last
        self._forked = 0  # the stream of the last fork; the copies and the join behind it in a plan use it
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def fork(self, stream: int) -> None:
        """Let the copies from here on wait for all that is enqueued on ``stream``."""
        self._forked = self._captured_beside(stream) if runtime.streamIsCapturing(stream) else self._eager.ptr
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._forked, self._fork.ptr)

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all copies that are enqueued."""
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
        """Return the stream for copies in the capture of which ``stream`` is part."""
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
