"""Timeline: the times at which work of streams began and ended, by the host's clock."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import event_is_done
from mpicomm.devices.cuda.events import LocalEvent
from mpicomm.devices.cuda.stream_order import relaxed, takes_part
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import HandleError

_READ_EVERY_NS = 1_000_000_000  # after a second CUDA's times, which are floats, are exact to a tenth of a microsecond
_FIRST_LIMIT_NS = 1_000_000_000
_LIMIT_NS = 1_000_000
_ROUNDS = 5


class Timeline:
    """Measures the work of one GPU's streams by CUDA events. Local; it never waits for the user's streams.

    ``now_ns`` reads the host's clock. CUDA tells only the time between two events. So the timeline compares the clocks
    by an event on its private stream, at first and then at most once a second. If other work delays that event, the
    last comparison stays valid. The timeline does not wait for it, because a wait could delay a rank for which kernels
    of other ranks wait. Raises `HandleError` if the device fails.
    """

    def __init__(self, backend: GpuBackend, now_ns: Callable[[], int]) -> None:
        self._backend = backend
        self._now_ns = now_ns
        self.idle: list[LocalEvent] = []
        """Events for later intervals."""
        self._base: tuple[LocalEvent, int] | None = None
        self._next_ns = 0
        with backend.loading(), self.guarded():
            self._stream: Any = cupy.cuda.Stream(non_blocking=True)
            self._compare(_FIRST_LIMIT_NS)

    def begin(self, stream: int) -> StreamInterval | None:
        """Begin an interval after the work that ``stream`` has at this call; None if it cannot be measured."""
        with contextlib.suppress(HandleError), self.guarded():
            if takes_part(stream):
                return None
            if self._now_ns() > self._next_ns:
                self._compare(_LIMIT_NS)
            if self._base is None:
                return None
            interval = StreamInterval(self, stream, self._base, self._take(), self._take())
            runtime.eventRecord(interval.start.ptr, stream)
            runtime.eventRecord(interval.stop.ptr, stream)
            return interval
        return None  # the call itself says which error has happened

    def _compare(self, limit_ns: int) -> None:
        """Compare the clocks by an event, which happens between an answer that it is not over and the next answer.

        Its record says little about its time, because another process that uses the GPU may delay it by milliseconds.
        """
        shortest = limit_ns
        for _ in range(_ROUNDS):
            event = self._take()
            begin = before = asked = self._now_ns()
            runtime.eventRecord(event.ptr, self._stream.ptr)
            while not (over := event_is_done(event.ptr)) and asked - begin < limit_ns:
                before, asked = asked, self._now_ns()
            if not over:
                break
            taken = self._now_ns() - before
            if taken < shortest:
                shortest, self._base = taken, (event, before + taken // 2)
        self._next_ns = self._now_ns() + _READ_EVERY_NS

    def _take(self) -> LocalEvent:
        try:
            return self.idle.pop()
        except IndexError:
            return LocalEvent(timed=True)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Make the device current and the thread relaxed, because a query would spoil a graph that a thread captures.

        Errors of CuPy become `HandleError`.
        """
        with self._backend.current(), relaxed():
            try:
                yield
            except runtime.CUDARuntimeError as error:
                raise HandleError(f"the times of a stream cannot be measured: {error}") from None


@dataclass(slots=True, eq=False)
class StreamInterval:
    """A part of a stream's work, from one event to another. Its methods are local and do not block."""

    timeline: Timeline
    stream: int
    base: tuple[LocalEvent, int]
    """The event of the comparison before this interval, and its time in nanoseconds of the host's clock."""
    start: LocalEvent
    stop: LocalEvent

    def extend(self) -> None:
        """Let the interval end after the work that the stream has at this call."""
        with contextlib.suppress(HandleError), self.timeline.guarded():
            runtime.eventRecord(self.stop.ptr, self.stream)

    def times_ns(self) -> tuple[int, int] | None:
        """Return begin and end of the interval, by the host's clock; None before its end.

        No further call follows after it has returned times. Raises `HandleError` if the device has failed.
        """
        with self.timeline.guarded():
            if not event_is_done(self.stop.ptr):
                return None
            base, base_ns = self.base
            start_ns = base_ns + round(runtime.eventElapsedTime(base.ptr, self.start.ptr) * 1e6)
            lasted_ns = round(runtime.eventElapsedTime(self.start.ptr, self.stop.ptr) * 1e6)
        self.timeline.idle += (self.start, self.stop)
        return start_ns, start_ns + lasted_ns
