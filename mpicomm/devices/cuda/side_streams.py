"""Side streams, for work that must not delay later work of the user's streams, also while a stream captures."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import cupy
from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import DriverShutDownError, call, event_is_done, stream_is_done
from mpicomm.devices.cuda.events import EventPool, LocalEvent, Mark
from mpicomm.devices.cuda.memory import PrimaryContext
from mpicomm.devices.cuda.stream_order import capture_of, relaxed, takes_part


class ForkedStream:
    """A side stream of a caller's stream, which forks to it and joins it by events. The device must be current.

    Each capture has another stream. A forked stream remains part of a capture until the capture ends, even after it has
    joined again. Until then it can neither run anything nor fork into another capture. The streams of ended captures
    serve new captures, so there are at most as many streams as captures that were open at once.
    """

    def __init__(self) -> None:
        self._eager: Any = cupy.cuda.Stream(non_blocking=True)
        self._captured: dict[int, Any] = {}  # by the capture that each stream forked into last
        self._forked = 0  # the stream of the last fork, for which the join waits
        self._fork: Any = cupy.cuda.Event(disable_timing=True)
        self._join: Any = cupy.cuda.Event(disable_timing=True)

    def of(self, stream: int) -> int:
        """Return the side stream of ``stream``: one for all eager work, and one for each capture."""
        found = self._eager
        if runtime.streamIsCapturing(stream):
            capture = capture_of(stream)
            if capture not in self._captured:
                over = next((each for each, side in self._captured.items() if not takes_part(side.ptr)), None)
                if over is not None:
                    self._captured[capture] = self._captured.pop(over)
                else:
                    with relaxed():
                        self._captured[capture] = cupy.cuda.Stream(non_blocking=True)
            found = self._captured[capture]
        return int(found.ptr)

    def fork(self, stream: int) -> int:
        """Return the side stream of ``stream``, which waits for all work that is enqueued on ``stream``."""
        self._forked = self.of(stream)
        runtime.eventRecord(self._fork.ptr, stream)
        runtime.streamWaitEvent(self._forked, self._fork.ptr)
        return self._forked

    def join(self, stream: int) -> None:
        """Let ``stream`` wait for all work since the forks."""
        runtime.eventRecord(self._join.ptr, self._forked)
        runtime.streamWaitEvent(stream, self._join.ptr)

    def close(self) -> None:
        """Destroy the streams and the events. A second call does nothing."""
        self._eager = self._fork = self._join = None
        self._captured.clear()


class SideStreams:
    """The side streams of one device, for work that waits for other ranks, and events.

    All methods are local, do not block except `wait`, and are for any thread.
    """

    # Methods first look whether the device is current. The look is cheaper than a change of context, and the device
    # nearly always is, because a new Communicator makes its GPU current. In its context they call themselves.

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._ordinal = context.device.ordinal
        self._lock = threading.Lock()
        self._free: list[int] = []
        """The streams that nobody has. They may be at work."""
        self._idle: list[int] = []
        """The streams that nobody has, and that have no work."""
        self._streams: list[Any] = []
        self._events = EventPool(context.current)

    def mark(self, stream: int, old: Mark | None = None) -> Mark:
        """Return a mark after the work that ``stream`` has at this call.

        It is cheaper with ``old``, a mark that the caller gives up.
        """
        # 0 to 2 name streams of the current device.
        if (old is None or stream <= 2) and runtime.getDevice() != self._ordinal:
            with self._context.current():
                return self.mark(stream, old)
        mark = old or self._events.acquire()
        runtime.eventRecord(mark.ptr, stream)
        return mark

    def event(self) -> LocalEvent:
        """Return a new event, which the caller keeps. An engine records it."""
        with self._context.current():
            return LocalEvent()

    def wait_stream(self, stream: int, other: int, old: Mark | None = None) -> None:
        """Let later work on ``stream`` wait for the work that the stream ``other`` has at this call.

        It is cheaper with ``old``, a mark that no other code uses.
        """
        if runtime.getDevice() != self._ordinal:
            with self._context.current():
                self.wait_stream(stream, other, old)
        else:
            mark = old or self._events.acquire()
            runtime.eventRecord(mark.ptr, other)
            runtime.streamWaitEvent(stream, mark.ptr)

    def is_done(self, mark: Mark) -> bool:
        """Return whether the work before a mark is done."""
        with self._context.current():
            return event_is_done(mark.ptr)

    def wait(self, mark: Mark) -> None:
        """Block until the work before a mark is done."""
        with self._context.current():
            call(driver.cuEventSynchronize, mark.ptr)

    def wait_event(self, stream: int, mark: Mark) -> None:
        """Let later work on ``stream`` wait for a mark."""
        if runtime.getDevice() != self._ordinal:
            with self._context.current():
                self.wait_event(stream, mark)
        else:
            runtime.streamWaitEvent(stream, mark.ptr)

    def acquire(self, after: Mark | None = None) -> int:
        """Return an idle stream that only the caller uses, until `release`. Its work follows the mark ``after``."""
        try:
            stream = self._idle.pop()
        except IndexError:  # a test beforehand is not enough: another thread may take the last stream
            stream = self._find_idle()
        if after is not None:
            self.wait_event(stream, after)
        return stream

    def _find_idle(self) -> int:
        with self._lock, self._context.current():
            # Not a stream that is still at work, because its work may wait for a peer. Later work on the stream would
            # wait, too, and two ranks could deadlock.
            idle = next((stream for stream in self._free if stream_is_done(stream)), None)
            if idle is not None:
                self._free.remove(idle)
                return idle
            # Non-blocking: else it and the null stream would wait for each other's work.
            self._streams.append(call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
            return int(self._streams[-1])

    def release(self, stream: int, *, is_idle: bool = False) -> None:
        """Let `acquire` return the stream again after the work on it is done, or at once if it ``is_idle``."""
        if is_idle:
            self._idle.append(stream)
        else:
            with self._lock:
                self._free.append(stream)

    def close(self) -> None:
        """Destroy the streams; the context must be current, and their work over. A second call does nothing."""
        self._free.clear()
        self._idle.clear()
        self._events.close()
        # The events of marks end with the last mark, which then has the only reference to their pool.
        self._events = EventPool(self._context.current)
        while self._streams:
            with contextlib.suppress(DriverShutDownError):
                call(driver.cuStreamDestroy, self._streams.pop())
