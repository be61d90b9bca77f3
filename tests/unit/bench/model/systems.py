"""Groups of the tests: times by a formula, and recorded times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mpicomm.bench.model.group import DomainTimes, MeasuredTimes, read_group
from mpicomm.bench.model.network import Network
from mpicomm.bench.model.schedules import SCHEDULES, System

RESULTS = Path(__file__).parents[4] / "scripts/results"
RECORDED = [RESULTS / f"{name}-8-h200.json" for name in ("allreduce", "allgather", "alltoall", "bcast")]
NETWORK = Network(gb_s=50, latency_us=5)
SIZES = [1 << power for power in range(10, 31, 2)]


def timed(time_us: Callable[[int], float]) -> MeasuredTimes:
    """Return the times that a formula gives."""
    return MeasuredTimes([(size, time_us(size)) for size in SIZES])


def flat_system(groups: int, ranks: int = 4, us: float = 2.0, nccl_us: float = 8.0) -> System:
    """A system whose groups take the same time for every call, so that formulae can be written down."""
    own = {collective: timed(lambda size: us) for collective in SCHEDULES}
    nccl = {collective: timed(lambda size: nccl_us) for collective in SCHEDULES}
    return System(DomainTimes(ranks, own, nccl), groups, NETWORK)


def recorded_system(groups: int) -> System:
    """Groups as recorded on 8 GPUs."""
    return System(read_group(RECORDED), groups, NETWORK)
