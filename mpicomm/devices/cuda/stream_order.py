"""The order of pieces of work that must not overlap, on whichever streams they are enqueued; captures of CUDA graphs.

While one thread captures in CUDA's default mode, CUDA forbids all threads most calls that are no stream work. Such a
call spoils the graph. A thread can exempt itself: then it is *relaxed*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Set
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.events import EventPool, LocalEvent, Mark
from mpicomm.errors import HandleError


def capture_of(stream: int) -> int:
    """Return the number of the capture of ``stream``. The number is unique in this process."""
    return int(call(driver.cuStreamGetCaptureInfo, stream)[1])


def takes_part(stream: int) -> bool:
    """Return whether ``stream`` takes part in a capture. A capture that is invalid and has not ended counts, too.

    CuPy's function takes a third of the time, but raises for an invalid capture.
    """
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    return bool(call(driver.cuStreamIsCapturing, stream) != none)


@contextlib.contextmanager
def relaxed() -> Iterator[None]:
    """Make the calling thread relaxed inside a ``with`` block."""
    before = relax()
    try:
        yield
    finally:
        call(driver.cuThreadExchangeStreamCaptureMode, before)


def relax() -> driver.CUstreamCaptureMode:
    """Make the calling thread relaxed from here on; return its previous mode."""
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return call(driver.cuThreadExchangeStreamCaptureMode, mode)


_MOST_CAPTURES = 16  # the number of open captures that may take pieces in turns

Enqueue = Callable[[int], object]
"""Enqueues work on a stream, or on another stream that is in order with it."""


class StreamOrder:
    """Makes each piece of work wait for the piece that was enqueued before it, whichever streams they are on.

    While a stream captures a graph, this holds among the pieces of the same capture. It does not hold between a graph
    and any other work. Inside a capture a stream cannot wait for an event from outside, and a stream outside cannot
    wait for an event of a capture. The driver refuses both, because the graph would wait for something that happened
    once. The program that launches a graph orders the graph, in the usual way: on one stream, or with events.
    """

    def __init__(
        self, current: Callable[[], contextlib.AbstractContextManager[None]], lasting: Set[int] = frozenset((0,))
    ) -> None:
        """``current`` makes the device current. The process never destroys the streams at the addresses ``lasting``."""
        self._lasting = lasting
        self.completions = EventPool(current)
        """The marks of callers that ask whether their piece is done."""
        self._own: Any = self.completions.acquire()  # the event to record after a piece without an event of its caller
        # The event to wait for before the next piece. This keeps it, because its owner may drop it. If other work then
        # recorded the event, the piece would wait for that work. A peer may begin that work only after the piece, so
        # both ranks would deadlock.
        self._awaited: Any = self._own
        self._stream = 0  # the stream on which `_awaited` was recorded
        # The events of captures, by capture, because no stream outside can wait for an event that a capture recorded.
        # The capture with the latest piece comes last. If there are too many captures, the first gives up its event,
        # because the driver does not say which captures are over.
        self._captured: dict[int, LocalEvent] = {}

    def enqueue(self, stream: int, eager: Enqueue, captured: Enqueue, event: LocalEvent | Mark | None = None) -> bool:
        """Call ``eager`` with ``stream``, or ``captured`` if the stream captures; this enqueues the next piece.

        Return whether it called ``eager``. Then it has recorded ``event`` after the piece. No other code records
        ``event``, but it may be the event of an earlier piece, also of the latest one. Local, does not block. The
        device must be current. An exception passes through, and the next piece follows the work that was enqueued.
        """
        # CuPy's functions, because every call comes here, and the driver's binding takes three times as long.
        if not runtime.streamIsCapturing(stream):
            # A lasting stream, such as the default stream, is in order with itself. Any other stream has to wait,
            # because a new stream may have the address of a stream that was destroyed with work pending. A wait for an
            # event without a record returns at once.
            if stream != self._stream or stream not in self._lasting:
                runtime.streamWaitEvent(stream, self._awaited.ptr)
            if event is None:
                event = self._own
            try:
                eager(stream)
                runtime.eventRecord(event.ptr, stream)
            except BaseException:
                # The piece may be enqueued in part or in whole, and the next piece has to follow it. A device that has
                # failed refuses this, too. The refusal must not hide the first error.
                with contextlib.suppress(runtime.CUDARuntimeError):
                    runtime.eventRecord(event.ptr, stream)
                raise
            finally:
                self._awaited = event
                self._stream = stream
            return True
        capture = capture_of(stream)
        inside = self._captured.get(capture)
        if inside is not None:
            call(driver.cuStreamWaitEvent, stream, inside.ptr, 0)
        elif len(self._captured) < _MOST_CAPTURES:
            inside = LocalEvent()
        else:
            inside = self._captured.pop(next(iter(self._captured)))
        try:
            captured(stream)
            call(driver.cuEventRecord, inside.ptr, stream)
        except BaseException:
            with contextlib.suppress(HandleError):  # as above; an invalid capture refuses it, too
                call(driver.cuEventRecord, inside.ptr, stream)
            raise
        finally:
            self._captured.pop(capture, None)
            self._captured[capture] = inside
        return False

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        self._own = self._awaited = None
        self._captured.clear()
        self.completions.close()
