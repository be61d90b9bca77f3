"""Carry out the pieces of a call: the network carries one piece while this rank works on the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpicomm.domains.steps import NetworkStep

DEPTH = 2
"""The pieces that are under way at once."""


def carry_out(
    pieces: Iterable[Iterable[Any]],
    work: Callable[[Any], object],
    start: Callable[[NetworkStep], Callable[[], object]],
) -> None:
    """Carry out pieces, each a row of steps in order: ``start`` a `NetworkStep`, ``work`` on all others.

    ``start`` returns the function that waits for the network messages.

    Of two pieces the later one first starts its network messages, then the earlier one waits for its own. All ranks of
    a peer domain make the same steps in the same order, because the order depends only on the number of network steps
    in each piece. A piece begins when the piece `DEPTH` before it is over, so that pieces take turns with `DEPTH` parts
    of scratch memory.
    """
    waiting, running = iter(pieces), deque[Iterator[None]]()
    while True:
        if len(running) < DEPTH and (piece := next(waiting, None)) is not None:
            running.appendleft(_steps(piece, work, start))
        if not running:
            return
        running = deque([each for each in running if next(each, _OVER) is not _OVER])


_OVER = object()


def _steps(
    piece: Iterable[Any], work: Callable[[Any], object], start: Callable[[NetworkStep], Callable[[], object]]
) -> Iterator[None]:
    """Carry out a piece, with a stop behind the start of each network step."""
    for step in piece:
        if isinstance(step, NetworkStep):
            finish = start(step)
            yield
            finish()
        else:
            work(step)
