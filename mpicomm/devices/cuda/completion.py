"""Completions: functions that say whether work on streams is done, by events that are used again and again."""

from __future__ import annotations

from collections.abc import Callable

import cupy
from cuda.bindings import driver

from mpicomm.devices.cuda.driver import is_over


class Completions:
    """Events of one device that nobody needs; to create one takes longer than to record it."""

    def __init__(self) -> None:
        self._idle: list[cupy.cuda.Event] = []

    def take(self) -> cupy.cuda.Event:
        """Return an event, to be recorded. The device must be current."""
        try:
            return self._idle.pop()
        except IndexError:  # not by a look before: threads that complete requests come here too, and take one meanwhile
            return cupy.cuda.Event(disable_timing=True)

    def of(self, event: cupy.cuda.Event) -> Callable[[], bool]:
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
