"""StreamOrder: the order of pieces of work that must not overlap, on whichever streams they are enqueued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Set
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.capture import capture_of
from mpicomm.devices.cuda.completion import Completions
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.local_event import LocalEvent
from mpicomm.errors import HandleError

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
        self._completions = Completions(current)
        self._eager: Any = self._completions.take()
        # Addresses of events, because every call uses them.
        self._recorded: int = self._eager.ptr  # the event to record after the next piece, outside of captures
        self._awaited = self._recorded  # the event to wait for before the next piece
        self._handed: Any = None  # the event that `completion` gave away last; the next piece may wait for it
        self._stream = 0  # the stream on which `_awaited` was recorded
        self._is_handed = True  # whether `hand_over` has nothing to give
        # The events of captures, by capture, because no stream outside can wait for an event that a capture recorded.
        # The capture with the latest piece comes last. If there are too many captures, the first gives up its event,
        # because the driver does not say which captures are over.
        self._captured: dict[int, LocalEvent] = {}

    def enqueue(self, stream: int, eager: Enqueue, captured: Enqueue) -> bool:
        """Call ``eager`` with ``stream``, or ``captured`` if the stream captures; this enqueues the next piece.

        Return whether it called ``eager``, so that `completion` can tell when the piece is done. Local, does not block.
        The device must be current. An exception passes through, and the next piece follows the work that was enqueued.
        """
        # CuPy's functions, because every call comes here, and the driver's binding takes three times as long.
        if not runtime.streamIsCapturing(stream):
            # A lasting stream, such as the default stream, is in order with itself. Any other stream has to wait,
            # because a new stream may have the address of a stream that was destroyed with work pending. A wait for an
            # event without a record returns at once.
            if stream != self._stream or stream not in self._lasting:
                runtime.streamWaitEvent(stream, self._awaited)
            try:
                eager(stream)
                runtime.eventRecord(self._recorded, stream)
            except BaseException:
                # The piece may be enqueued in part or in whole, and the next piece has to follow it. A device that has
                # failed refuses this, too. The refusal must not hide the first error.
                with contextlib.suppress(runtime.CUDARuntimeError):
                    runtime.eventRecord(self._recorded, stream)
                raise
            finally:
                self._awaited = self._recorded
                self._stream = stream
            self._is_handed = False
            return True
        self._is_handed = True
        capture = capture_of(stream)
        event = self._captured.get(capture)
        if event is not None:
            call(driver.cuStreamWaitEvent, stream, event.ptr, 0)
        elif len(self._captured) < _MOST_CAPTURES:
            event = LocalEvent()
        else:
            event = self._captured.pop(next(iter(self._captured)))
        try:
            captured(stream)
            call(driver.cuEventRecord, event.ptr, stream)
        except BaseException:
            with contextlib.suppress(HandleError):  # as above; an invalid capture refuses it, too
                call(driver.cuEventRecord, event.ptr, stream)
            raise
        finally:
            self._captured.pop(capture, None)
            self._captured[capture] = event
        return False

    def completion(self) -> Callable[[], bool]:
        """Return a function that says whether the piece that was enqueued last is done; for any thread.

        Call it at most once for each piece, and not for pieces of captures. Local.
        """
        return self._completions.of(self._give(self._completions.take()))

    def hand_over(self, replacement: LocalEvent | None) -> LocalEvent | None:
        """Return the event after the latest piece; None for a piece of a capture, and after `pass_over`. Local.

        The next piece records ``replacement``, or a new event. It may be an event of an earlier call, which may be the
        latest: the next piece waits for the event before it records the event again. No other code records the event.
        Call it at most once for each piece.
        """
        if self._is_handed:
            return None
        return self._give(self._completions.take() if replacement is None else replacement)

    def _give(self, replacement: LocalEvent) -> LocalEvent:
        """Return the event after the latest piece, and let the next piece record ``replacement``."""
        # `_handed` keeps the event, because the caller may drop it. The next streamWaitEvent is for this event, so the
        # event must still exist then.
        handed: LocalEvent = self._eager
        self._handed = handed
        self._eager, self._recorded, self._is_handed = replacement, replacement.ptr, True
        return handed

    def pass_over(self) -> None:
        """Let `hand_over` return None, because the latest call has no piece. Local."""
        self._is_handed = True

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        self._eager = self._handed = None
        self._captured.clear()
        self._completions.close()
