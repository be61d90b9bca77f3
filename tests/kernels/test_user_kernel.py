"""mpicomm.cuh, the public header, in the kernel of examples/ring_sum.cu."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_uint32, c_uint64

import numpy as np
import pytest

from tests.helpers.jobs.mpiexec import ROOT
from tests.helpers.references.reductions import reduced, require_same
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Machine, require_seen

SOURCE = ROOT / "examples" / "ring_sum.cu"
CALLS = 60


def run(
    builds: Builds, size: int, changes: Sequence[Change] = (), *, absent: int | None = None, timeout_s: float = 20
) -> list[int]:
    """Return the ranks' reports of missing ranks; all ranks compare their sums."""
    kernel = builds.kernel(SOURCE, "ring_sum", changes=changes)
    machine, ranks, count = Machine(builds, size), range(size), 300
    rng = np.random.default_rng(size)
    inboxes = [machine.allocate(rank, 2 * size * count * 4) for rank in ranks]
    flags = [machine.allocate(rank, 8) for rank in ranks]
    failed = [machine.allocate(rank, 4) for rank in ranks]
    tables = [
        [machine.place(rank, np.array([machine.address(r, each[r], rank) for r in ranks], np.uint64)) for rank in ranks]
        for each in (inboxes, flags)
    ]
    values = [[rng.integers(0, 1000, count).astype(np.float32) for _ in ranks] for _ in range(CALLS)]
    sums = [[machine.allocate(rank, count * 4) for rank in ranks] for _ in range(CALLS)]
    for call in range(CALLS):
        for rank in ranks:
            if rank == absent:
                continue
            places = (sums[call][rank], machine.place(rank, values[call][rank]))
            parameters = (
                *(c_uint64(place.address) for place in places),
                c_uint32(count),
                *(c_uint64(table[rank].address) for table in tables),
                *(c_uint32(rank), c_uint32(size), c_uint64(call), c_uint64(int(timeout_s * 1e9))),
                c_uint64(failed[rank].address),
            )
            nap_us = int(rng.choice((0, 0, 0, 0, 300)))
            machine.launch(rank, kernel, parameters, blocks=1, threads=96, nap_us=nap_us)
    machine.run(seed=size, jitter_us=200, limit_s=30)
    said = [int(each.view(np.uint32)[0]) for each in failed]
    if not any(said):
        for call in range(CALLS):
            for rank in ranks:
                require_same(sums[call][rank].bytes.view(np.float32), reduced("sum", values[call]))
    return said


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_sums_of_all_ranks(builds: Builds, size: int) -> None:
    assert run(builds, size) == [0] * size


def test_rank_that_does_not_come_ends_the_wait(builds: Builds) -> None:
    assert run(builds, 3, absent=1, timeout_s=0.001) == [1, 0, 1]


@pytest.mark.parametrize("size", [2, 3])
def test_no_race(watched_builds: Builds, size: int) -> None:
    assert run(watched_builds, size) == [0] * size


@pytest.mark.parametrize(
    "change",
    [
        Change("include/mpicomm/flags.cuh", "else store_release(", "else store_relaxed("),
        Change("include/mpicomm/flags.cuh", "has_reached(load_acquire(", "has_reached(load_relaxed("),
        Change("include/mpicomm/flags.cuh", "  group.sync();\n", ""),
        Change("include/mpicomm/flags.cuh", "return group.all(", "return ("),
        Change("ring_sum.cu", "call % 2 * size", "0 * size"),
    ],
    ids=["release turned relaxed", "acquire turned relaxed", "signal early", "only a wait", "one buffer"],
)
def test_race_is_seen(watched_builds: Builds, change: Change) -> None:
    require_seen(lambda _: run(watched_builds, 3, [change]))
