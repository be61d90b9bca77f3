"""Random tokens and routes of all ranks, and the check of the results of `Experts`, on the arrays of a machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.bench.machine import Machine
from mpicomm.experts.arrays import Received


class Routes:
    """Tokens with ``top_k`` different experts each, drawn alike on all ranks."""

    def __init__(
        self, machine: Machine, rank: int, size: int, shape: tuple[int, int], top_k: int, experts: int, dtype: Any
    ) -> None:
        self._xp = machine.xp
        self._rank, self._size, self._experts = rank, size, experts
        self.tokens, self.hidden = shape
        rng = np.random.default_rng(shape)
        self.ids_of_all = [
            np.argsort(rng.random((self.tokens, experts)), axis=1)[:, :top_k].astype(np.int64) for _ in range(size)
        ]
        self.ids = self._xp.asarray(self.ids_of_all[rank])
        self.weights = self._xp.asarray(np.random.default_rng(rank).random((self.tokens, top_k), np.float32))
        self._dtype = dtype
        self.x = self.tokens_of(rank)

    @property
    def crossing(self) -> int:
        """The number of tokens that this rank sends to other ranks; a token counts once for each rank."""
        return int(sum(np.count_nonzero(self.goes_to(rank)) for rank in range(self._size) if rank != self._rank))

    def goes_to(self, rank: int) -> npt.NDArray[np.bool_]:
        """Return for each token of this rank whether it goes to ``rank``."""
        first, end = self._range_of(rank)
        ids = self.ids_of_all[self._rank]
        there: npt.NDArray[np.bool_] = np.any((ids >= first) & (ids < end), axis=1)
        return there

    def tokens_of(self, rank: int) -> Any:
        """Return the tokens of a rank: small whole numbers, which all types have."""
        xp = self._xp
        rows = xp.arange(self.tokens, dtype=xp.int32)[:, None] * 31 + rank * 17
        return ((rows + xp.arange(self.hidden, dtype=xp.int32) * 7) % 127 - 63).astype(self._dtype)

    def count_wrong_rows(self, received: Received) -> int:
        """Return the number of wrong rows of a dispatch on this rank, with rows that are missing."""
        xp = self._xp
        first, end = self._range_of(self._rank)
        expected = sum(int(np.count_nonzero((ids >= first) & (ids < end))) for ids in self.ids_of_all)
        used = int(received.offsets[-1])
        sources = received.sources[:used]
        wrong = abs(expected - used)
        ids = xp.asarray(np.stack(self.ids_of_all))
        experts = ids[sources[:, 0], sources[:, 1], sources[:, 2]]
        counts = _host(received.counts)
        if counts.sum() != used:
            return max(wrong, 1)
        wrong += int(xp.count_nonzero(experts != xp.asarray(np.repeat(np.arange(first, end), counts))))
        if received.rows is not None:
            # Each row has a place, so the places check all rows.
            wrong += abs(int(received.row_count[0]) - len(xp.unique(received.rows[:used])))
        for rank in range(self._size):
            mine = xp.flatnonzero(sources[:, 0] == rank)
            tokens = self.tokens_of(rank)
            for begin in range(0, len(mine), 4096):
                places = mine[begin : begin + 4096]
                rows = places if received.rows is None else received.rows[places]
                wrong += int(xp.count_nonzero((received.x[rows] != tokens[sources[places, 1]]).any(axis=1)))
        return wrong

    def count_wrong_sums(self, sums: Any, *, weighted: bool) -> int:
        """Return the number of wrong sums of a combine of the dispatched rows themselves.

        With ``weighted`` each slot counts by its weight. Otherwise each rank with experts of a token counts once.
        """
        xp = self._xp
        total = xp.zeros((self.tokens, self.hidden), xp.float32)
        x = self.x.astype(xp.float32)
        for rank in range(self._size):
            first, end = self._range_of(rank)
            if not weighted:
                present = ((self.ids >= first) & (self.ids < end)).any(axis=1)
                total += xp.where(present[:, None], x, xp.float32(0))
                continue
            partial = xp.zeros_like(total)
            for slot in range(self.ids.shape[1]):
                there = (self.ids[:, slot] >= first) & (self.ids[:, slot] < end)
                factors = xp.where(there, self.weights[:, slot], xp.float32(0))
                partial += factors[:, None] * x
            total += partial.astype(self._dtype).astype(xp.float32)
        return int(xp.count_nonzero((total.astype(self._dtype) != sums).any(axis=1)))

    def _range_of(self, rank: int) -> tuple[int, int]:
        each, rest = divmod(self._experts, self._size)
        first = rank * each + min(rank, rest)
        return first, first + each + (rank < rest)


def _host(array: Any) -> npt.NDArray[Any]:
    copy: npt.NDArray[Any] = array.get() if hasattr(array, "get") else array
    return copy
