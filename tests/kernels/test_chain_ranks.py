"""Chains with a rank that is missing, does not take data that comes, or calls something else."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="the arguments of kernels are made by modules that need cuda-bindings")

from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.kernels.build import Builds
from tests.kernels.channel_rigs import ChainRig
from tests.kernels.machine import Machine, RunFailedError

LARGE = 1 << 18  # elements: more than the slots of a block hold


def add(rig: ChainRig, rank: int, count: int) -> None:
    """Enqueue a rank's part of a sum for the last rank."""
    dtype, root = np.dtype(np.float32), rig.size - 1
    span = Span(rig.machine.allocate(rank, count * dtype.itemsize).address, count)
    output = span if rank == root else None
    exchanges = patterns.reduce(rank, rig.size, dtype, span, output, "sum", root, "chain")
    rig.run(rank, exchanges, Signature("Reduce", dtype.name, count, "sum", root))


@pytest.mark.parametrize("counts", [(100, 99), (1, 100)], ids=["same packets", "fewer packets"])
def test_ranks_that_disagree_notice(builds: Builds, counts: tuple[int, int]) -> None:
    rig = ChainRig(Machine(builds, 2), 1)
    for rank, count in enumerate(counts):
        add(rig, rank, count)
    with pytest.raises(RunFailedError, match=r"fault on rank 1: state=2, operation=3, sequence=1, block=0, peer=10"):
        rig.machine.run(limit_s=10)


def test_rank_that_is_missing_is_named(builds: Builds) -> None:
    rig = ChainRig(Machine(builds, 3), 1, timeout_s=0.2)
    add(rig, 1, 100)
    with pytest.raises(RunFailedError, match=r"fault on rank 1: state=2, operation=2, sequence=1, block=0, peer=10"):
        rig.machine.run(limit_s=10)


def test_rank_that_does_not_take_is_named(builds: Builds) -> None:
    rig = ChainRig(Machine(builds, 2), 1, timeout_s=0.2)
    add(rig, 0, LARGE)
    with pytest.raises(RunFailedError, match=r"fault on rank 0: state=2, operation=2, sequence=1, block=\d, peer=11"):
        rig.machine.run(limit_s=10)
