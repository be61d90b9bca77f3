"""The content of the buffers: random data, which every rank can make for every other rank, and the expected results.

The data of a rank repeats after a prime number of elements, far from every power of two. So blocks, chunks and shards
in a wrong place do not match. NumPy computes one period of the result in rank order. The check compares every element
of an array of any size with that period, on the device of the array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.bench.operations import Case, CaseBuffers

_PERIOD = 1_000_003
_POISON = 0xA5
_SAMPLE = 4096  # the elements to compare at each end of a block, if a result need not be exact
_EPSILON = {1: 2.0**-2, 2: 2.0**-7, 4: 2.0**-22, 8: 2.0**-51}  # the coarsest float type of each size, one bit spared

_UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = tuple(_UFUNCS)


@dataclass(frozen=True)
class ExpectedPart:
    """A part of an output: ``count`` elements from ``start`` on equal elements of a period from ``offset`` on."""

    start: int
    count: int
    period: int
    offset: int


REDUCED = -1
"""The number of the reduction's period. The period of a rank's data has the number of the rank."""


class Content:
    """The data of all ranks, up to ``longest`` elements each, for one element type and operation."""

    def __init__(self, xp: Any, dtype: np.dtype[Any], op: str, size: int, longest: int, *, reduces: bool) -> None:
        self._xp = xp
        self._dtype = dtype
        self._size = size
        self._word = np.dtype(f"uint{8 * dtype.itemsize}")
        data = [random_data(dtype, min(longest, _PERIOD), rank) for rank in range(size)]
        if reduces:
            data.append(reduce_in_order(op, data))  # at the end, because REDUCED is -1
        self._host = data
        self._periods = [xp.asarray(period.view(self._word)) for period in data]

    @staticmethod
    def poison(array: Any) -> None:
        """Fill bytes with values that no data has."""
        array.fill(_POISON)

    def prepare(self, case: Case, buffers: CaseBuffers) -> None:
        """Poison the buffer that a case receives into, and write the data that it sends."""
        if buffers.receive is not None:
            self.poison(buffers.receive)
        if case.has_input:
            self.write(buffers.send, case.rank)

    def write(self, array: Any, rank: int) -> None:
        """Write the data of a rank into an array."""
        words = array.view(self._word)
        for start, stop, data in self._tiles(rank, 0, words.size):
            words[start:stop] = data

    def count_differing(self, array: Any, period: int, offset: int = 0) -> int:
        """Return the number of elements that differ from those of a period from ``offset`` on. It compares all."""
        words = array.view(self._word)
        tiles = self._tiles(period, offset, words.size)
        return int(sum(self._xp.count_nonzero(words[start:stop] != data) for start, stop, data in tiles))

    def count_wrong(self, case: Case, buffers: CaseBuffers, *, exact: bool, error: float = 0.0) -> int:
        """Return the number of wrong elements that a case received.

        It compares all elements, bit by bit. With ``exact=False`` it compares only the ends of each block, with a
        tolerance for another order of additions. ``error`` is as in `Contender`.
        """
        pieces = expected(case)
        if buffers.receive is None or not pieces:
            return 0
        words = buffers.receive.view(self._word)
        if not error and (exact or not case.operation.reduces):
            return sum(
                self.count_differing(words[piece.start : piece.start + piece.count], piece.period, piece.offset)
                for piece in pieces
            )
        if case.operation.reduces and case.op != "avg":
            error *= self._size
        return sum(self._count_far(words, piece, error) for piece in pieces)

    def _tiles(self, period: int, offset: int, count: int) -> list[tuple[int, int, Any]]:
        """Cut ``count`` elements of the repeated data into (start, stop, part of the period)."""
        data = self._periods[period]
        tiles, start = [], 0
        while start < count:
            begin = (offset + start) % data.size
            step = min(count - start, data.size - begin)
            tiles.append((start, start + step, data[begin : begin + step]))
            start += step
        return tiles

    def _count_far(self, words: Any, piece: ExpectedPart, error: float) -> int:
        wrong = 0
        for start in {0, max(0, piece.count - _SAMPLE)}:
            count = min(_SAMPLE, piece.count - start)
            part = words[piece.start + start : piece.start + start + count]
            found = (part if isinstance(part, np.ndarray) else part.get()).view(self._dtype)
            period = self._host[piece.period]
            wanted = period[(piece.offset + start + np.arange(count)) % period.size]
            if self._dtype.kind in "iu":
                wrong += int(np.count_nonzero(found != wanted))
                continue
            found, wanted = found.astype(np.float64), wanted.astype(np.float64)
            room = self._size * self._size * _EPSILON[self._dtype.itemsize] + error
            wrong += int(np.count_nonzero(~(np.abs(found - wanted) <= room)))  # a NaN is wrong
        return wrong


def random_data(dtype: np.dtype[Any], count: int, rank: int) -> npt.NDArray[Any]:
    """Return a rank's data: integers of all bits, floats between -1 and 1."""
    generator = np.random.default_rng([2026, rank])
    if dtype.kind in "iu":
        return generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    return generator.uniform(-1, 1, count).astype(dtype)


def reduce_in_order(op: str, data: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the reduction in rank order. Floats below 32 bits are accumulated in float32 and rounded once."""
    dtype = data[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype
    with np.errstate(over="ignore"):
        total = data[0].astype(wide)
        for part in data[1:]:
            total = _UFUNCS[op](total, part.astype(wide))
        if op == "avg":
            total = total / wide.type(len(data))
        return total.astype(dtype)


def expected(case: Case) -> list[ExpectedPart]:
    """Return the parts of the output of a case on this rank."""
    rank, block = case.rank, case.block
    if case.operation.reduces:
        offset = rank * block if case.operation.sends_blocks else 0
        return [ExpectedPart(0, block, REDUCED, offset)] if case.has_output else []
    pieces, start = [], 0
    for peer in case.sources:
        counts, displs = case.seen_from(peer).sent()
        pieces.append(ExpectedPart(start, counts[rank], peer, displs[rank]))
        start += counts[rank]
    return pieces
