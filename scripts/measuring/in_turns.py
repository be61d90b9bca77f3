"""Time several ways to do one thing in turns, so that a change of the machine's speed meets all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.bench.measure import GpuMachine

WORLD = MPI.COMM_WORLD
_WARM_UPS = 2


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, finish: Callable[[], object] = lambda: None
) -> dict[str, float]:
    """Return the median of seconds of each way, of the slowest rank; collective. Two rounds before warm up.

    ``finish`` waits for a device, before each work and as a part of it.

    Each round begins with another way, because a way may leave the caches in another state for the next one.
    """
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + _WARM_UPS):
        order.append(order.pop(0))
        for name in order:
            work = ways[name]
            finish()
            WORLD.Barrier()
            start = time.perf_counter()
            work()
            finish()
            seconds[name].append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return {name: statistics.median(values[_WARM_UPS:]) for name, values in seconds.items()}


def median_us(work: Callable[[], object], rounds: int, finish: Callable[[], object]) -> float:
    """Return the median of microseconds of one way, like `in_turns`; collective."""
    return 1e6 * in_turns({"work": work}, rounds, finish)["work"]


def graph_us(comm: Any, calls: Sequence[Callable[[], object]], count: int, rounds: int) -> list[float]:
    """Return the microseconds of each of ``calls`` in a CUDA graph of ``count``, of the slowest rank; collective."""
    gpu = GpuMachine()
    graphs = []
    with gpu.current():
        for call in calls:
            call()  # compiles, and sets up memory
            call()
            gpu.finish()
            graphs.append(gpu.capture(call, count))
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for graph, times in zip(graphs, seconds, strict=True):
            times.append(gpu.time_graph(graph).complete)
    comm.check()
    return [1e6 * float(comm.allreduce(statistics.median(times), MPI.MAX)) for times in seconds]
