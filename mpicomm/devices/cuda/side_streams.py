"""Streams beside the user's, for work that waits for other ranks and must not hold up later work."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import DriverShutDownError, call, is_over
from mpicomm.devices.cuda.local_event import LocalEvent


class SideStreams:
    """A pool of streams. All methods are local, for any thread, and do not block."""

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._free: list[int] = []
        self._streams: list[Any] = []

    def mark(self, stream: int) -> LocalEvent:
        """Return a mark behind the work that ``stream`` has been given so far."""
        with self._context.current():
            event = LocalEvent()
            runtime.eventRecord(event.ptr, stream)
        return event

    def passed(self, mark: LocalEvent) -> bool:
        """Return whether the work before a mark is done."""
        with self._context.current():
            return is_over(driver.cuEventQuery, mark.ptr)

    def wait(self, mark: LocalEvent) -> None:
        """Block until the work before a mark is done."""
        with self._context.current():
            call(driver.cuEventSynchronize, mark.ptr)

    def follow(self, stream: int, mark: LocalEvent) -> None:
        """Let later work on ``stream`` wait for a mark."""
        with self._context.current():
            runtime.streamWaitEvent(stream, mark.ptr)

    def take(self, after: LocalEvent | None = None) -> int:
        """Return an idle stream for the caller alone, until `give_back`. Its work follows the mark ``after``."""
        with self._lock, self._context.current():
            # Not a stream that is still at work, which may wait for a peer: unordered work behind it would wait, too,
            # and two ranks could wait for each other in a circle.
            idle = next((stream for stream in self._free if is_over(driver.cuStreamQuery, stream)), None)
            if idle is not None:
                self._free.remove(idle)
                stream = idle
            else:
                # Non-blocking: else it and the null stream would wait for each other's work.
                self._streams.append(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
                stream = int(self._streams[-1])
        if after is not None:
            self.follow(stream, after)
        return stream

    def give_back(self, stream: int) -> None:
        """Let `take` return the stream again, once the work on it is done."""
        with self._lock:
            self._free.append(stream)

    def close(self) -> None:
        """Destroy the streams; the context must be current, and their work over. A second call does nothing."""
        self._free.clear()
        while self._streams:
            with contextlib.suppress(DriverShutDownError):
                call(driver.cuStreamDestroy, self._streams.pop())
