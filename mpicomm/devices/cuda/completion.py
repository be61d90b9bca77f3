"""Completions: functions that say whether work on streams is done, by events that are used again and again."""

from __future__ import annotations

from collections.abc import Callable

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import is_over
from mpicomm.devices.cuda.local_event import LocalEvent


class Completions:
    """Events of one device that nobody needs; to create one takes longer than to record it."""

    def __init__(self) -> None:
        self._idle: list[LocalEvent] = []

    def take(self) -> LocalEvent:
        """Return an event, to be recorded. The device must be current."""
        try:
            return self._idle.pop()
        except IndexError:  # not by a look before: threads that complete requests come here too, and take one meanwhile
            return LocalEvent()

    def of(self, event: LocalEvent) -> Callable[[], bool]:
        """Return a function that says whether what ``event`` was recorded after is done; callable in any thread.

        The event is taken back when it has said so, and the function is not called any more.
        """
        pointer = event.ptr

        def done() -> bool:
            # Raises where the device has failed: what is enqueued there is never done.
            if not is_over(driver.cuEventQuery, pointer):
                return False
            self._idle.append(event)
            return True

        return done

    def close(self) -> None:
        """Destroy the events. The device must be current."""
        self._idle.clear()
