"""ForkedStream: a stream that forks from the stream of a caller and joins it again, also in a capture."""

from __future__ import annotations

from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.devices.cuda.beside_stream import BesideStream


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
