"""Exchanges between processes: every size at which the kernel changes its behaviour, types, and long runs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.gpu.algorithms.memory import CHUNK_SLOTS
from tests.kernels.build import Builds
from tests.kernels.channel_rigs import ExchangeRig
from tests.kernels.kernel_calls import Calls, random_counts, sizes_around
from tests.kernels.machine import Machine

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

# Types of each size, of each kind of state of a reduction, and of each way to read an element.
REDUCTIONS = [
    ("bool", "land"),
    ("float8_e4m3fn", "avg"),
    ("float32", "sum"),
    ("complex64", "tree"),
    ("complex128", "prod"),
    ("float32", "a * 2 - b"),
]


def limits(rig: ExchangeRig) -> tuple[int, ...]:
    """Bytes at which a message gets a further block, a further chunk, or chunks that reuse a slot."""
    channels, slots_nbytes = rig.layout.channels, rig.layout.channels * rig.layout.slot_nbytes
    return (16, CHANNEL_NBYTES, channels * CHANNEL_NBYTES, slots_nbytes, slots_nbytes * CHUNK_SLOTS)


@pytest.mark.parametrize(("size", "channels"), [(1, 2), (3, 1), (4, 2)])
def test_every_size_at_which_something_changes(builds: Builds, size: int, channels: int) -> None:
    rng = np.random.default_rng([size, channels])
    rig = ExchangeRig(Machine(builds, size), channels, threads=(None, 64, 96, 512))
    calls = Calls(rig, rng, nap_us=2000)
    sizes = sizes_around(*limits(rig))
    checks = [calls.alltoallv(random_counts(rng, size, sizes)) for _ in range(12)]
    checks += [calls.bcast(nbytes) for nbytes in sizes]
    for count, two_shot in itertools.product(sizes_around(*limits(rig), itemsize=4), (False, True)):
        checks.append(calls.allreduce("float32", "sum", count, two_shot=two_shot))
    rig.machine.run(checks, seed=size, jitter_us=300)


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda reduction: "-".join(reduction))
def test_every_class_of_types(builds: Builds, reduction: tuple[str, str]) -> None:
    rig = ExchangeRig(Machine(builds, 3), 2, threads=(None, 160))
    calls = Calls(rig, np.random.default_rng([ord(letter) for letter in reduction[0]]))
    checks = []
    for count in (1, 2, 15, 1021, 9001):
        checks += [calls.allreduce(*reduction, count, in_place=in_place) for in_place in (False, True)]
        checks += [calls.allreduce(*reduction, count, two_shot=True), calls.scan(*reduction, count)]
    rig.machine.run(checks, seed=1, jitter_us=100)


def test_thousands_of_chunks_across_the_end_of_32_bits(builds: Builds) -> None:
    size = 3
    rng = np.random.default_rng(size)
    rig = ExchangeRig(Machine(builds, size), 2, threads=(64,))
    rig.start_at(2**32 - 700)
    calls = Calls(rig, rng, nap_us=3000)
    for batch in range(3):
        rig.machine.clear()
        checks = [calls.bcast(9_830_400)]  # dozens of chunks at once
        for _ in range(250):
            checks.append(calls.allreduce("float32", "sum", int(rng.integers(1, 300))))
            checks.append(calls.alltoallv(random_counts(rng, size, (0, 0, 1, 200, 20000))))
        rig.machine.run(checks, seed=batch, jitter_us=(0, 500)[batch % 2])
    # The first channel has gone past the end, and both sides have counted alike.
    sent, received = ([rig.epoch(rank, 1 - rank, sent=way) for rank in (0, 1)] for way in (True, False))
    assert sent == received[::-1]
    assert all(0 < epoch < 2**31 for epoch in sent)
