"""Ranks as text, which is short also for many ranks. Linux writes the cores of a processor so, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

_MOST = 1 << 20


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, with ranges: "0-3,8". A negative number, which is no rank, becomes "?"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank >= 0 and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join("?" if low < 0 else str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ranks_of_text(text: str) -> tuple[int, ...]:
    """Return the ranks of a text of `ranks_as_text`, 2^20 at most; -1 for each "?". A part that is cut off is left out.

    The text may be of another process, and of any content.
    """
    return tuple(islice(chain.from_iterable(map(_part, text.split(","))), _MOST))


def _part(part: str) -> Iterable[int]:
    low, _, high = part.partition("-")
    if part == "?":
        return (-1,)
    if not low.isdecimal() or not (high or low).isdecimal() or len(part) > 24:  # no rank has more digits
        return ()
    return range(int(low), int(high or low) + 1)
