"""Completions: functions that return whether work of streams is done, by words in host memory that streams write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from mpicomm.devices.cuda.capture import relaxed
from mpicomm.devices.cuda.driver import call, is_over
from mpicomm.devices.cuda.local_event import LocalEvent
from mpicomm.devices.host import fence

_WORDS = 1024  # of a piece of memory
_LARGEST = (1 << 32) - 1
_LOOKS = 64  # between two questions whether the device has failed

_Word = tuple[memoryview, int, int]
"""The memory of a word, its number there, and its address."""


class Completions:
    """A pool of words for the streams of one device. `grow` comes before all else.

    The host reads a word in a tenth of a microsecond. The driver takes 2 us to say whether an event is over, and the
    question spoils a graph that another thread captures.
    """

    def __init__(self) -> None:
        self._idle: list[_Word] = []
        self._event: Any = None

    def grow(self) -> None:
        """Add words. It may wait for the device, which must be current."""
        with relaxed():  # another stream may capture a graph
            memory = cupy.cuda.alloc_pinned_memory(4 * _WORDS)
            self._event = self._event or LocalEvent()
        words = np.frombuffer(memory, np.uint32, _WORDS)
        words[:] = 0
        self._idle += [(words.data, number, memory.ptr + 4 * number) for number in range(_WORDS)]

    def after(self, stream: int) -> Callable[[], bool]:
        """Return a function that says whether the work that ``stream`` has at this call is done; for any thread.

        Callers do not call the function again after it has returned true, because the word is then back in the pool.
        The device must be current, and the stream must not capture. Local.
        """
        words, number, pointer = word = self._take()
        wanted, looks, event = words[number] + 1 & _LARGEST, 0, self._event
        # The driver writes after all earlier work of the stream, and after the stores of that work.
        call(driver.cuStreamWriteValue32, stream, pointer, wanted, 0)

        def done() -> bool:
            nonlocal looks
            if words[number] == wanted:
                fence()  # an acquire, which pairs with the write: the host may read next what the work has stored
                self._idle.append(word)
                return True
            looks += 1
            if looks % _LOOKS == 0:
                is_over(driver.cuEventQuery, event.ptr)  # raises if the device has failed: it writes no word then
            return False

        return done

    def close(self) -> None:
        """Drop the words and the event. Memory lives as long as a function that looks there."""
        self._idle.clear()
        self._event = None

    def _take(self) -> _Word:
        """Return a word that no other work uses."""
        try:
            return self._idle.pop()
        except IndexError:  # a test beforehand is not enough: a thread that completes requests may give a word back
            self.grow()
            return self._idle.pop()
