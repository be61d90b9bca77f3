"""The bytes that a rank or a GPU writes into the memory of others, and the check of each byte."""

from __future__ import annotations

from typing import Any

import numpy as np

_CHUNK_NBYTES = 1 << 20  # of the pattern at once: it takes little memory, and fits into a CPU's cache
_WORD = np.dtype(np.uint32)


class Pattern:
    """Bytes that depend on the rank that wrote them, the iteration and their index.

    They are a 32-bit hash of the word index and a seed, so shifted, swapped, stale or missing data do not match. ``xp``
    is the array module, numpy or cupy.
    """

    def __init__(self, xp: Any) -> None:
        self._xp = xp
        self._ramp = xp.arange(_CHUNK_NBYTES // _WORD.itemsize, dtype=_WORD) * _WORD.type(0x9E3779B1)
        self._words = xp.empty_like(self._ramp)
        self._shifted = xp.empty_like(self._ramp)
        self._expected = xp.empty(_CHUNK_NBYTES, np.uint8)

    def write(self, target: Any, rank: int, iteration: int) -> None:
        """Write the pattern into an array of bytes. The kernel of the array module stores straight into it."""
        for start in range(0, target.size, _CHUNK_NBYTES):
            self._write_chunk(target[start : start + _CHUNK_NBYTES], start, rank, iteration)

    def count_wrong(self, array: Any, rank: int, iteration: int) -> int:
        """Return the number of bytes of an array that differ from the pattern. It compares all bytes."""
        wrong = 0
        for start in range(0, array.size, _CHUNK_NBYTES):
            chunk = array[start : start + _CHUNK_NBYTES]
            expected = self._expected[: chunk.size]
            self._write_chunk(expected, start, rank, iteration)
            wrong += int(self._xp.count_nonzero(chunk != expected))
        return wrong

    def _write_chunk(self, target: Any, start: int, rank: int, iteration: int) -> None:
        xp = self._xp
        count = -(-target.size // _WORD.itemsize)
        words, shifted = self._words[:count], self._shifted[:count]
        offset = start // _WORD.itemsize * 0x9E3779B1 + (rank + 1) * 0x85EBCA77 + (iteration + 1) * 0xC2B2AE3D
        xp.add(self._ramp[:count], _WORD.type(offset % 2**32), out=words)
        xp.right_shift(words, _WORD.type(15), out=shifted)
        xp.bitwise_xor(words, shifted, out=words)
        xp.multiply(words, _WORD.type(0x2C1B3C6D), out=words)
        xp.right_shift(words, _WORD.type(13), out=shifted)
        # The last step works on bytes, so the target needs no alignment, and a tail is no special case.
        xp.bitwise_xor(words.view(np.uint8)[: target.size], shifted.view(np.uint8)[: target.size], out=target)
