"""The ring all-reduce through exchange.cu between processes has the bits of the ring's order."""

from __future__ import annotations

import numpy as np
import pytest

from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.reductions import dtype_named, require_same, samples
from tests.helpers.references.ring_order import ring_reduced
from tests.kernels.build import Builds
from tests.kernels.channel_rigs import ExchangeRig
from tests.kernels.kernel_calls import Check, sizes_around
from tests.kernels.machine import Machine

pytest.importorskip("ml_dtypes")
pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

CHANNELS = 2


def ring_allreduce(
    rig: ExchangeRig, rng: np.random.Generator, name: str, op: str, count: int, *, in_place: bool
) -> Check:
    """Enqueue it on all ranks, one of them perhaps late; return the check of all results."""
    dtype, ranks = dtype_named(name), range(rig.size)
    parts = [samples(dtype, count, rng) for _ in ranks]
    offsets = rng.choice((0, dtype.itemsize), (2, rig.size))  # aligned to packets, or only to elements
    sources = [rig.machine.place(rank, parts[rank], offset=int(offsets[0, rank])) for rank in ranks]
    targets = sources
    if not in_place:
        targets = [rig.machine.allocate(rank, parts[rank].nbytes, offset=int(offsets[1, rank])) for rank in ranks]
    late = rng.integers(rig.size)
    for rank in ranks:
        send, output = Span(sources[rank].address, count), Span(targets[rank].address, count)
        exchanges = patterns.ring_allreduce(rank, rig.size, dtype, send, output, op)
        signature = Signature("Allreduce", dtype.name, count, op)
        rig.run(rank, exchanges, signature, nap_us=1000 if rank == late else 0)

    def check() -> None:
        expected = ring_reduced(op, parts)
        for target in targets:
            require_same(target.bytes.copy().view(dtype), expected)

    return check


@pytest.mark.parametrize(("size", "in_place"), [(2, False), (3, True), (4, False)])
def test_every_size_at_which_something_changes(builds: Builds, size: int, in_place: bool) -> None:
    rng = np.random.default_rng([size, in_place])
    rig = ExchangeRig(Machine(builds, size), CHANNELS)
    # The bytes of the whole array, and of a shard.
    limits = [128, CHANNEL_NBYTES, CHANNELS * CHANNEL_NBYTES, CHANNELS * rig.layout.slot_nbytes]
    counts = sizes_around(4 * size, *limits, *(size * limit for limit in limits), itemsize=4)
    checks = [ring_allreduce(rig, rng, "float32", "sum", count, in_place=in_place) for count in counts]
    rig.machine.run(checks, seed=size, jitter_us=300)


@pytest.mark.parametrize(
    "reduction",
    [("bool", "land"), ("bfloat16", "sum"), ("complex128", "prod")],
    ids="-".join,
)
def test_every_class_of_types(builds: Builds, reduction: tuple[str, str]) -> None:
    rng = np.random.default_rng([ord(letter) for letter in reduction[0]])
    rig = ExchangeRig(Machine(builds, 3), CHANNELS)
    checks = [
        ring_allreduce(rig, rng, *reduction, count, in_place=in_place)
        for count in (1, 2, 15, 1021, 9001)
        for in_place in (False, True)
    ]
    rig.machine.run(checks, seed=1, jitter_us=100)
