"""Carry out the pieces of a call: the network carries one piece while this rank works on the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mpicomm.domains.steps import NetworkStep

DEPTH = 2
"""The number of pieces that are in progress at once."""


def carry_out(
    pieces: Iterable[Iterable[Any]],
    work: Callable[[Any], object],
    start: Callable[[NetworkStep], Callable[[], object]],
) -> None:
    """Carry out pieces, each a sequence of steps: ``start`` a `NetworkStep`, ``work`` on all other steps.

    ``start`` returns the function that waits for the network messages.

    If two pieces are in progress, the later piece first starts its network messages. Then the earlier piece waits for
    its network messages. The order of the steps depends only on the number of network steps in each piece. So all ranks
    of a peer domain make the same steps in the same order. A piece begins when the piece `DEPTH` before it is over, so
    that pieces take turns with `DEPTH` parts of scratch memory.
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
    """Carry out a piece, and stop after the start of each network step."""
    for step in piece:
        if isinstance(step, NetworkStep):
            finish = start(step)
            yield
            finish()
        else:
            work(step)
