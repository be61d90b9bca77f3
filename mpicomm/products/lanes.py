"""Lanes: two streams for products, which fork from the stream of a caller and join it again, also in a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import cupy
from cupy.cuda import runtime

from mpicomm.devices.cuda.beside_stream import BesideStream

LANES = 2


class Lanes:
    """Products run on the lanes in turns. The number of a product in its call says its turn."""

    def __init__(self) -> None:
        self._streams = [BesideStream() for _ in range(LANES)]
        self._begin, *self._ends = (cupy.cuda.Event(disable_timing=True) for _ in range(1 + LANES))

    def run(self, number: int, lane: int, stream: int, work: Callable[[int], object]) -> None:
        """Enqueue a product on a lane, after all work that is enqueued on ``stream``."""
        beside = self._streams[lane].of(stream)
        runtime.eventRecord(self._begin.ptr, stream)
        runtime.streamWaitEvent(beside, self._begin.ptr)
        work(beside)
        runtime.eventRecord(self._end_of(number), beside)

    def join(self, numbers: Iterable[int], stream: int) -> None:
        """Let ``stream`` wait for products, each of which is one of the last two."""
        for number in numbers:
            runtime.streamWaitEvent(stream, self._end_of(number))

    def _end_of(self, number: int) -> Any:
        return self._ends[number % LANES].ptr
