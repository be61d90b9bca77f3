"""Completions: a pool of events that say whether work on streams is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import is_over
from mpicomm.devices.cuda.local_event import LocalEvent


class Completion(LocalEvent):
    """An event of the pool ``idle``."""

    __slots__ = ("_idle",)

    def __init__(self, idle: list[Completion]) -> None:
        super().__init__()
        self._idle = idle

    def passed(self) -> bool:
        """Return whether the work before the recorded event is done; for any thread.

        Callers do not call it again after it has returned true, because the event is then back in the pool.
        """
        # It raises if the device has failed, because work of a failed device is never done.
        if not is_over(driver.cuEventQuery, self.ptr):
            return False
        self._idle.append(self)
        return True


class Completions:
    """A pool of events of one device, because the driver takes longer to create an event than to record it.

    ``current`` makes the device current in a ``with`` block.
    """

    def __init__(self, current: Callable[[], AbstractContextManager[None]]) -> None:
        self._current = current
        self._idle: list[Completion] = []

    def take(self) -> Completion:
        """Return an event for the caller to record."""
        try:
            return self._idle.pop()
        except IndexError:  # a test beforehand is not enough: a thread that completes requests may take the last event
            with self._current():
                return Completion(self._idle)

    def give_back(self, event: Completion) -> None:
        """Let `take` return an event again that nobody has recorded."""
        self._idle.append(event)

    def close(self) -> None:
        """Destroy the events of the pool."""
        self._idle.clear()
