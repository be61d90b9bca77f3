"""Random tokens and the experts to which they go, alike on all ranks that draw by the same seed; and the right results.

The results come from plain loops over tokens and slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


@dataclass
class Laid:
    """The rows that a rank receives."""

    rows: Array
    counts: list[int]
    offsets: list[int]
    sources: list[tuple[int, int, int]]
    weights: list[float]


@dataclass
class LaidByToken:
    """The rows that a rank receives in the layout by token. Its places are as in `Laid`."""

    rows: Array
    sources: list[tuple[int, int]]
    """The rank and the token of each row."""
    topk_ids: list[list[int]]
    topk_weights: list[list[float]]


class Routing:
    """Tokens with ids and weights for each rank. A part ``none`` of the slots has no expert.

    Without ``tokens``, the number of tokens of each rank, ranks have random numbers of tokens.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        experts_per_rank: Sequence[int],
        hidden: int,
        max_tokens: int,
        top_k: int,
        dtype: np.dtype[Any],
        *,
        none: float = 0.2,
        tokens: Sequence[int] | None = None,
    ) -> None:
        self.experts_per_rank = experts_per_rank
        experts = sum(experts_per_rank)
        counts = rng.integers(max_tokens + 1, size=len(experts_per_rank)) if tokens is None else tokens
        self.xs = [rng.standard_normal((count, hidden)).astype(dtype) for count in counts]
        self.ids: list[Array] = []
        for count in counts:
            ids = np.where(rng.random((count, top_k)) < none, -1, rng.integers(experts, size=(count, top_k)))
            self.ids.append(ids.astype((np.int64, np.int32)[int(rng.integers(2))]))
        self.weights = [rng.random((count, top_k), dtype=np.float32) for count in counts]

    def laid(self, alignment: int) -> list[Laid]:
        """Return the rows of every rank; gaps have zeros, and sources of -1."""
        return [self._laid(rank, alignment) for rank in range(len(self.xs))]

    def laid_by_token(self) -> list[LaidByToken]:
        """Return the rows of every rank in the layout by token: each token once that has an expert there."""
        return [self._laid_by_token(rank) for rank in range(len(self.xs))]

    def _tokens(self) -> Iterator[tuple[int, int]]:
        """Yield the tokens of all ranks in the order of rows, with their ranks."""
        for token in range(max(map(len, self.ids))):
            yield from ((source, token) for source, routes in enumerate(self.ids) if token < len(routes))

    def _rows(self, rows: list[Array]) -> Array:
        return np.array(rows, self.xs[0].dtype).reshape(len(rows), self.xs[0].shape[1])

    def _laid(self, rank: int, alignment: int) -> Laid:
        first, laid, rows = sum(self.experts_per_rank[:rank]), Laid(np.empty(0), [], [0], [], []), list[Array]()
        for expert in range(first, first + self.experts_per_rank[rank]):
            count = 0
            for source, token in self._tokens():
                for slot in np.flatnonzero(self.ids[source][token] == expert).tolist():
                    rows.append(self.xs[source][token])
                    laid.sources.append((source, token, slot))
                    laid.weights.append(float(self.weights[source][token, slot]))
                    count += 1
            while len(rows) % alignment:
                rows.append(np.zeros_like(self.xs[0], shape=self.xs[0].shape[1:]))
                laid.sources.append((-1, -1, -1))
                laid.weights.append(0.0)
            laid.counts.append(count)
            laid.offsets.append(len(rows))
        laid.rows = self._rows(rows)
        return laid

    def _laid_by_token(self, rank: int) -> LaidByToken:
        first, laid, rows = sum(self.experts_per_rank[:rank]), LaidByToken(np.empty(0), [], [], []), list[Array]()
        for source, token in self._tokens():
            slots = [int(chosen) - first for chosen in self.ids[source][token]]
            here = [0 <= chosen < self.experts_per_rank[rank] for chosen in slots]
            if not any(here):
                continue
            rows.append(self.xs[source][token])
            laid.sources.append((source, token))
            laid.topk_ids.append([chosen if mine else -1 for chosen, mine in zip(slots, here, strict=True)])
            weights = zip(self.weights[source][token], here, strict=True)
            laid.topk_weights.append([float(weight) if mine else 0.0 for weight, mine in weights])
        laid.rows = self._rows(rows)
        return laid

    def sums_by_token(self, laid: Sequence[LaidByToken], outputs: Sequence[Array], rank: int, dtype: Any) -> Array:
        """Return the sums of a rank; ``outputs`` are the rows of all ranks after their experts."""
        total = np.zeros((len(self.xs[rank]), outputs[0].shape[1]), np.float32)
        for mine, rows in zip(laid, outputs, strict=True):
            for row, (source, token) in enumerate(mine.sources):
                if source == rank:
                    total[token] += rows[row].astype(np.float32)
        return total.astype(dtype)

    def sums(self, laid: Sequence[Laid], outputs: Sequence[Array], rank: int, dtype: Any, *, weighted: bool) -> Array:
        """Return the sums of a rank; ``outputs`` are the rows of all ranks after their experts."""
        total = np.zeros((len(self.xs[rank]), outputs[0].shape[1]), np.float32)
        for mine, rows in zip(laid, outputs, strict=True):
            partial, sources = np.zeros_like(total), enumerate(mine.sources)
            slots = sorted((slot, token, row) for row, (source, token, slot) in sources if source == rank)
            for _, token, row in slots:
                factor = np.float32(mine.weights[row] if weighted else 1)
                partial[token] += factor * rows[row].astype(np.float32)
            total += partial.astype(rows.dtype).astype(np.float32)
        return total.astype(dtype)

    def slots_by_token(self, laid: Sequence[LaidByToken], values: Sequence[Array], rank: int) -> Array:
        """Return the values of the slots of a rank; ``values`` are numbers of the slots of the rows of all ranks."""
        found = np.zeros(self.ids[rank].shape, np.float32)
        for mine, numbers in zip(laid, values, strict=True):
            for row, (source, token) in enumerate(mine.sources):
                here = np.array(mine.topk_ids[row]) >= 0
                if source == rank:
                    found[token, here] = numbers[row, here]
        return found

    def of_slots(self, laid: Sequence[Laid], values: Sequence[Array], rank: int) -> Array:
        """Return the values of the rows of each slot of a rank; ``values`` are numbers of the rows of all ranks."""
        found = np.zeros(self.ids[rank].shape, np.float32)
        for mine, numbers in zip(laid, values, strict=True):
            for row, (source, token, slot) in enumerate(mine.sources):
                if source == rank:
                    found[token, slot] = numbers[row]
        return found


def require_same(what: str, found: Array, expected: Any) -> None:
    """Compare all bits of numbers."""
    wanted = np.ascontiguousarray(expected, found.dtype).reshape(found.shape)
    bits = np.dtype(f"u{found.dtype.itemsize}")
    differ = np.argwhere(np.ascontiguousarray(found).view(bits) != wanted.view(bits))
    assert not len(differ), f"{what} differ, first at {differ[0]}: {found[tuple(differ[0])]}"


def require_laid_out(laid: Laid, rows: Array, counts: Array, offsets: Array, sources: Array, weights: Array) -> None:
    """Compare the arrays of a dispatch with the reference."""
    require_places(laid, counts, offsets, sources, weights)
    used = laid.offsets[-1]
    require_same("rows", rows[:used], laid.rows)


def require_laid_by_token(laid: LaidByToken, places: Laid, found: Mapping[str, Array]) -> None:
    """Compare the arrays of a dispatch with the reference, by their names in `Received`."""
    require_places(places, *(found[name] for name in ("counts", "offsets", "sources", "weights")))
    count = len(laid.rows)
    require_same("number of rows", found["row_count"], [count])
    require_same("rows", found["x"][:count], laid.rows)
    for name, expected, none in (("topk_ids", laid.topk_ids, -1), ("topk_weights", laid.topk_weights, 0)):
        rest = found[name][count:]
        require_same(name, found[name][:count], np.array(expected).reshape(count, rest.shape[1]))
        require_same(f"{name} of the rest", rest, np.full_like(rest, none))
    rows = {source: row for row, source in enumerate(laid.sources)}
    of_places = [rows.get((source, token), -1) for source, token, _ in places.sources]
    require_same("rows of places", found["rows"], of_places + [-1] * (len(found["rows"]) - len(of_places)))
    for source, token in np.ndindex(*found["token_rows"].shape):
        if token < found["tokens"][source]:
            assert found["token_rows"][source, token] == rows.get((source, token), -1)


def require_places(laid: Laid, counts: Array, offsets: Array, sources: Array, weights: Array) -> None:
    """Compare the arrays that describe places with the reference."""
    used = laid.offsets[-1]
    require_same("counts", counts, laid.counts)
    require_same("offsets", offsets, laid.offsets)
    require_same("sources", sources[:used], np.array(laid.sources).reshape(-1, 3))
    require_same("sources of the rest", sources[used:], np.full_like(sources[used:], -1))
    require_same("weights", weights, [*laid.weights, *[0] * (len(weights) - used)])
