"""The results of a mixture of experts, in plain loops over tokens and slots."""

from __future__ import annotations

from collections.abc import Sequence
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


def by_token(
    xs: Sequence[Array],
    ids: Sequence[Array],
    weights: Sequence[Array],
    experts_per_rank: Sequence[int],
    rank: int,
) -> LaidByToken:
    """Return the rows of ``rank``: each token once that has an expert there."""
    first = sum(experts_per_rank[:rank])
    laid = LaidByToken(np.empty(0), [], [], [])
    rows: list[Array] = []
    for token in range(max(map(len, ids))):
        for source, routes in enumerate(ids):
            if token >= len(routes):
                continue
            slots = [int(chosen) - first for chosen in routes[token]]
            here = [0 <= chosen < experts_per_rank[rank] for chosen in slots]
            if not any(here):
                continue
            rows.append(xs[source][token])
            laid.sources.append((source, token))
            laid.topk_ids.append([chosen if mine else -1 for chosen, mine in zip(slots, here, strict=True)])
            laid.topk_weights.append(
                [float(weight) if mine else 0.0 for weight, mine in zip(weights[source][token], here, strict=True)]
            )
    laid.rows = np.array(rows, xs[0].dtype).reshape(len(rows), xs[0].shape[1])
    return laid


def dispatched(
    xs: Sequence[Array],
    ids: Sequence[Array],
    weights: Sequence[Array],
    experts_per_rank: Sequence[int],
    rank: int,
    alignment: int = 1,
) -> Laid:
    """Return the rows of ``rank``; gaps have zeros, and sources of -1."""
    first = sum(experts_per_rank[:rank])
    laid = Laid(np.empty(0), [], [0], [], [])
    rows: list[Array] = []
    for expert in range(first, first + experts_per_rank[rank]):
        count = 0
        for token in range(max(map(len, ids))):
            for source, routes in enumerate(ids):
                if token >= len(routes):
                    continue
                for slot, chosen in enumerate(routes[token]):
                    if chosen == expert:
                        rows.append(xs[source][token])
                        laid.sources.append((source, token, slot))
                        laid.weights.append(float(weights[source][token, slot]))
                        count += 1
        while len(rows) % alignment:
            rows.append(np.zeros_like(xs[0], shape=xs[0].shape[1:]))
            laid.sources.append((-1, -1, -1))
            laid.weights.append(0.0)
        laid.counts.append(count)
        laid.offsets.append(len(rows))
    laid.rows = np.array(rows, xs[0].dtype).reshape(len(rows), xs[0].shape[1])
    return laid


def combined_by_token(
    laid: Sequence[LaidByToken], outputs: Sequence[Array], rank: int, tokens: int, result: np.dtype[Any]
) -> Array:
    """Return the sums for the tokens of ``rank``; ``outputs`` are the rows of all ranks after their experts."""
    total = np.zeros((tokens, outputs[0].shape[1]), np.float32)
    for mine, rows in zip(laid, outputs, strict=True):
        for row, (source, token) in enumerate(mine.sources):
            if source == rank:
                total[token] += rows[row].astype(np.float32)
    return total.astype(result)


def combined(
    laid: Sequence[Laid],
    outputs: Sequence[Array],
    rank: int,
    tokens: int,
    result: np.dtype[Any],
    *,
    weighted: bool = True,
) -> Array:
    """Return the sums for the tokens of ``rank``; ``outputs`` are the rows of all ranks after their experts."""
    hidden = outputs[0].shape[1]
    total = np.zeros((tokens, hidden), np.float32)
    for mine, rows in zip(laid, outputs, strict=True):
        partial = np.zeros((tokens, hidden), np.float32)
        slots = sorted((slot, token, row) for row, (source, token, slot) in enumerate(mine.sources) if source == rank)
        for _, token, row in slots:
            factor = np.float32(mine.weights[row] if weighted else 1)
            partial[token] += factor * rows[row].astype(np.float32)
        total += partial.astype(rows.dtype).astype(np.float32)
    return total.astype(result)
