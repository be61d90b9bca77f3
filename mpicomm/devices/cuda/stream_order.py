"""The order of work that is enqueued on several streams but must not overlap."""

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

_MOST_CAPTURES = 16  # whose pieces are kept in order: they are open at once, and given pieces by turns

Enqueue = Callable[[int], object]
"""Enqueues something on a stream, or on another that is in order with it."""


class StreamOrder:
    """Makes each piece of work wait for the one enqueued before it, whichever streams they are on.

    While a stream captures a graph, that holds among the pieces of the same capture. Between a graph and anything else
    it does not: an event recorded outside a capture cannot be waited for inside (the driver refuses it, as the graph
    would wait for something that happened once), nor the other way round. When a graph runs is for whoever launches it
    to say, in the usual way: on one stream, or with events of their own.
    """

    def __init__(self) -> None:
        self._completions = Completions()
        self._eager: Any = self._completions.take()
        # Events by their addresses, as they are on the way of every call.
        self._recorded: int = self._eager.ptr  # after the next piece, outside of captures
        self._awaited = self._recorded  # before it
        self._handed: Any = None  # what `completion` gave away last, which may be the one that is awaited
        self._stream = 0  # the one that `_awaited` was recorded on
        # Others, since an event that was last recorded in a capture can be waited for nowhere else. They are found by
        # the captures, of which the one with the latest piece comes last; nobody says which of them are over.
        self._captured: dict[int, LocalEvent] = {}

    def enqueue(self, stream: int, eager: Enqueue, captured: Enqueue) -> bool:
        """Call ``eager`` with ``stream``, or ``captured`` if that takes part in a capture: they enqueue the next piece.

        Return whether it was the first of these, so that `completion` can say when the piece is done. Local, does not
        block. The device must be current. What interrupts this goes on, and the next piece follows what was enqueued.
        """
        # CuPy's functions where a call is to take few microseconds in all: each takes a third of the driver's binding.
        if not runtime.streamIsCapturing(stream):
            # The default stream, 0, is in order with itself. Of others the address says nothing: a new one may have
            # that of one that was destroyed with work pending. To wait for what was never recorded costs nothing.
            if stream != 0 or self._stream != 0:
                runtime.streamWaitEvent(stream, self._awaited)
            try:
                eager(stream)
                runtime.eventRecord(self._recorded, stream)
            except BaseException:
                # Some of the piece may be enqueued, or all of it. A device that has failed refuses this too, which must
                # not take the place of what it said first.
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
            with contextlib.suppress(HandleError):  # as above, and of a capture that was invalidated
                call(driver.cuEventRecord, event.ptr, stream)
            raise
        finally:
            self._captured.pop(capture, None)
            self._captured[capture] = event
        return False

    def completion(self) -> Callable[[], bool]:
        """Return a function that says whether the piece that was enqueued last is done, by the event of the order.

        Once for each piece, not of captures. Local. The device must be current; the function is callable in any thread.
        """
        # Kept here too, whatever becomes of the function: the next streamWaitEvent is for this event, and would be for
        # one that is destroyed.
        self._handed, self._eager = self._eager, self._completions.take()
        self._recorded = self._eager.ptr
        return self._completions.of(self._handed)

    def close(self) -> None:
        """Destroy the events. A second call does nothing."""
        self._eager = self._handed = None
        self._captured.clear()
        self._completions.close()
