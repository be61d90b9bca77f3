"""Exchanges under ThreadSanitizer, which finds two accesses without an order, in whatever order they happened."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from tests.kernels.build import Builds
from tests.kernels.channel_rigs import ExchangeRig
from tests.kernels.kernel_calls import Calls, random_counts, sizes_around
from tests.kernels.machine import Machine

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")


@pytest.mark.parametrize(("size", "channels"), [(2, 2), (4, 2)])
def test_no_race(watched_builds: Builds, size: int, channels: int) -> None:
    rng = np.random.default_rng(size)
    # ThreadSanitizer knows 8000 threads at most.
    rig = ExchangeRig(Machine(watched_builds, size), channels, threads=(64, 96))
    calls = Calls(rig, rng, nap_us=2000)
    slots_nbytes = channels * rig.layout.slot_nbytes
    sizes = sizes_around(16, CHANNEL_NBYTES, slots_nbytes, 3 * slots_nbytes)
    checks = [calls.alltoallv(random_counts(rng, size, sizes)) for _ in range(8)]
    checks += [calls.bcast(nbytes) for nbytes in sizes[::2]]
    for count in (1, 5, 1000, 4097, 40000):
        checks += [calls.allreduce("float32", "sum", count, two_shot=two_shot) for two_shot in (False, True)]
        checks.append(calls.reduce_scatter("float32", "sum", [count] * size, in_place=True))
    checks += [calls.allreduce("float32", "sum", int(count)) for count in rng.integers(1, 2000, 40)]
    rig.machine.run(checks, seed=size, jitter_us=200)
