"""Streams beside the stream of the caller, also while the stream of the caller captures a graph."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.devices.cuda.capture import capture_of, relaxed, takes_part


class BesideStream:
    """A stream for work beside a caller's stream, which forks to it and joins it by events. The device must be current.

    Each capture has another stream. A forked stream remains part of a capture until the capture ends, even after it has
    joined again. Until then it can neither run anything nor fork into another capture. The streams of ended captures
    serve new captures, so there are at most as many streams as captures that were open at once.
    """

    def __init__(self) -> None:
        self._eager: Any = cupy.cuda.Stream(non_blocking=True)
        self._captured: dict[int, Any] = {}  # by the capture that each stream forked into last

    def of(self, stream: int) -> int:
        """Return the stream beside ``stream``: one for all eager work, and one for each capture."""
        pointer: int = (self._of_capture(stream) if runtime.streamIsCapturing(stream) else self._eager).ptr
        return pointer

    def close(self) -> None:
        """Destroy the streams. A second call does nothing."""
        self._eager = None
        self._captured.clear()

    def _of_capture(self, stream: int) -> Any:
        capture = capture_of(stream)
        if capture not in self._captured:
            over = next((each for each, beside in self._captured.items() if not takes_part(beside.ptr)), None)
            if over is not None:
                self._captured[capture] = self._captured.pop(over)
            else:
                with relaxed():
                    self._captured[capture] = cupy.cuda.Stream(non_blocking=True)
        return self._captured[capture]


class ForkedStream:
    """A stream for work beside the work of a caller's stream. The device must be current."""

    def __init__(self) -> None:
        self._beside = BesideStream()
        self._forked = 0  # the stream of the last fork, for which the join waits
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def fork(self, stream: int) -> int:
        """Return the stream, which waits for all work that is enqueued on ``stream``."""
        self._forked = self._beside.of(stream)
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._forked, self._fork.ptr)
        return self._forked

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all work since the forks."""
        runtime.eventRecord(self._join.ptr, self._forked)
        runtime.streamWaitEvent(stream, self._join.ptr)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._fork = self._join = None
        self._beside.close()
