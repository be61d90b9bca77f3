"""StreamOrder: the order of pieces of work that must not overlap, on whichever streams they are enqueued."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.cuda.capture import capture_of
from mpicomm.devices.cuda.completion import Completions
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.local_event import LocalEvent
from mpicomm.errors import HandleError

_MOST_CAPTURES = 16  # that may be open at once and take pieces in turns

Enqueue = Callable[[int], object]
"""Enqueues work on a stream, or on another stream that is in order with it."""


class StreamOrder:
    """Makes each piece of work wait for the piece that was enqueued before it, whichever streams they are on.

    While a stream captures a graph, this holds among the pieces of the same capture. It does not hold between a graph
    and any other work, because inside a capture a stream cannot wait for an event from outside, nor the other way
    round: the driver refuses it, as the graph would wait for something that happened once. The program that launches a
    graph orders it, in the usual way: on one stream, or with events.
    """

    def __init__(self) -> None:
        self._completions = Completions()
        self._eager: Any = self._completions.take()
        # Addresses of events, because every call uses them.
        self._recorded: int = self._eager.ptr  # after the next piece, outside of captures
        self._awaited = self._recorded  # before it
        self._handed: Any = None  # the event that `completion` gave away last, which the next piece may wait for
        self._stream = 0  # on which `_awaited` was recorded
        # The events of captures, by capture: no stream outside can wait for an event that a capture recorded. The
        # capture with the latest piece comes last. The first one gives its event up where there are too many, because
        # the driver does not say which captures are over.
        self._captured: dict[int, LocalEvent] = {}

    def enqueue(self, stream: int, eager: Enqueue, captured: Enqueue) -> bool:
        """Call ``eager`` with ``stream``, or ``captured`` if the stream captures: they enqueue the next piece.

        Return whether it called ``eager``, so that `completion` can tell when the piece is done. Local, does not block.
        The device must be current. An exception passes through, and the next piece follows whatever was enqueued.
        """
        # CuPy's functions, which take a third of the time of the driver's binding: this is on the way of every call.
        if not runtime.streamIsCapturing(stream):
            # The default stream, 0, is in order with itself. Any other stream has to wait, because a new stream may
            # have the address of one that was destroyed with work pending. A wait for an event that nobody has recorded
            # returns at once.
            if stream != 0 or self._stream != 0:
                runtime.streamWaitEvent(stream, self._awaited)
            try:
                eager(stream)
                runtime.eventRecord(self._recorded, stream)
            except BaseException:
                # Some of the piece may be enqueued, or all of it: the next piece has to follow that. A device that has
                # failed refuses this, too, which must not take the place of its first error.
                with contextlib.suppress(runtime.CUDARuntimeError):
                    runtime.eventRecord(self._recorded, stream)
                raise
            finally:
                self._awaited = self._recorded
                self._stream = stream
            return True
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
        """Return a function, for any thread, that returns whether the piece that was enqueued last is done.

        To be called at most once for each piece, and not for pieces of captures. Local. The device must be current.
        """
        # `_handed` keeps the event although the caller may drop the function: the next streamWaitEvent is for this
        # event, which must not be destroyed by then.
        self._handed, self._eager = self._eager, self._completions.take()
        self._recorded = self._eager.ptr
        return self._completions.of(self._handed)

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        self._eager = self._handed = None
        self._captured.clear()
        self._completions.close()
