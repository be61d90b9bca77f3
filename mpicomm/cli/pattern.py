"""The bytes that a rank or a GPU writes into the memory of others, and the check of each byte."""

from __future__ import annotations

from typing import Any

import numpy as np

_PERIOD = 1_000_003  # prime, so that data in a wrong place does not match


class Pattern:
    """Random bytes of the rank that wrote them, to which each iteration adds another number.

    So shifted, swapped, stale or missing data do not match. ``xp`` is the array module, numpy or cupy.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._periods: dict[int, Any] = {}
        self._expected = xp.empty(_PERIOD, np.uint8)

    def write(self, target: Any, rank: int, iteration: int) -> None:
        """Write the pattern into an array of bytes. The kernel of the array module stores straight into it."""
        if rank not in self._periods:
            self._periods[rank] = self._xp.asarray(np.random.default_rng(rank).integers(0, 256, _PERIOD, np.uint8))
        for start in range(0, target.size, _PERIOD):
            part = target[start : start + _PERIOD]
            self._xp.add(self._periods[rank][: part.size], np.uint8(iteration * 37 % 256), out=part)

    def count_wrong(self, array: Any, rank: int, iteration: int) -> int:
        """Return the number of bytes of an array that differ from the pattern. It compares all bytes."""
        wrong = 0
        for start in range(0, array.size, _PERIOD):
            part = array[start : start + _PERIOD]
            expected = self._expected[: part.size]
            self.write(expected, rank, iteration)
            wrong += int(self._xp.count_nonzero(part != expected))
        return wrong
