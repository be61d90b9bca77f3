"""Time several ways to do one thing in turns, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from mpi4py import MPI

WORLD = MPI.COMM_WORLD


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the median of seconds of each way, of the slowest rank; collective. Round 0 warms up and does not count.

    Each round begins with another way, because a way may leave the caches in another state for the next one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + 1):
        order.append(order.pop(0))
        for name in order:
            work = ways[name]
            WORLD.Barrier()
            start = time.perf_counter()
            work()
            seconds[name].append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return {name: statistics.median(values[1:]) for name, values in seconds.items()}
