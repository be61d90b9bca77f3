"""Completions: functions that return whether work on streams is done, by events from a pool."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import is_over
from mpicomm.devices.cuda.local_event import LocalEvent


class Completions:
    """A pool of events of one device, because the driver takes longer to create an event than to record it.

    ``current`` makes the device current in a ``with`` block.
    """

    def __init__(self, current: Callable[[], AbstractContextManager[None]]) -> None:
        self._current = current
        self._idle: list[LocalEvent] = []

    def take(self) -> LocalEvent:
        """Return an event for the caller to record."""
        try:
            return self._idle.pop()
        except IndexError:  # a test beforehand is not enough: a thread that completes requests may take the last event
            with self._current():
                return LocalEvent()

    def give_back(self, event: LocalEvent) -> None:
        """Let `take` return an event again."""
        self._idle.append(event)

    def of(self, event: LocalEvent) -> Callable[[], bool]:
        """Return a function that says whether the work before the recorded ``event`` is done; for any thread.

        Callers do not call the function again after it has returned true, because the event is then back in the pool.
        """
        pointer = event.ptr

        def done() -> bool:
            # It raises if the device has failed, because work of a failed device is never done.
            if not is_over(driver.cuEventQuery, pointer):
                return False
            self._idle.append(event)
            return True

        return done

    def close(self) -> None:
        """Destroy the events of the pool."""
        self._idle.clear()
