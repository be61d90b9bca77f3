"""Broadcasts and reductions along a chain of ranks: of any size, type, root and address; other calls are refused."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.communicator_calls import Case, Prepared
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.communicators import to_host

COUNTS = (1, 5, 4097, 70_001, 2_100_003)  # the last needs several chunks of each warp


def run(comm: mpicomm.Communicator, xp: Any, cases: list[Case]) -> None:
    """Run all calls without a wait between them, and look at all results; the cpu has no chains and refuses."""
    if comm.device == "cpu":
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match='"chain" of .* is for device arrays: use'):
            Prepared(cases[0], comm.rank, comm.size, xp).run(comm)
        return
    prepared = []
    for case in cases:
        prepared.append(Prepared(case, comm.rank, comm.size, xp))
        prepared[-1].run(comm)
    comm.check()
    for each in prepared:
        each.check()


@pytest.mark.parametrize("count", COUNTS)
def test_broadcasts_of_every_root_at_any_address(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    choices = itertools.product(("int8", "float32", "complex128"), range(comm.size), (0, 4))
    run(
        comm,
        xp,
        [
            Case(
                "Bcast",
                dtype_named(name),
                count,
                root=root,
                form="typed",
                algorithm="chain",
                offset=offset,
                seed=offset,
            )
            for name, root, offset in choices
        ],
    )


@pytest.mark.parametrize("count", COUNTS)
def test_reductions_in_rank_order(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    kinds = (("float32", "sum"), ("float64", "prod"), ("int16", "sum"), ("uint8", "max"), ("complex64", "sum"))
    run(
        comm,
        xp,
        [
            Case("Reduce", dtype_named(name), count, op, root, "typed", in_place, "chain", offset, count, wild=True)
            for (name, op), root, in_place, offset in itertools.product(
                kinds, {0, comm.size - 1}, (False, True), (0, 8)
            )
        ],
    )


def test_what_a_chain_is_not_for(comm: mpicomm.Communicator, xp: Any) -> None:
    array, result = xp.ones(5, np.float16), xp.zeros(5, np.float16)
    text = "first or the last rank as root" if comm.device != "cpu" else "is for device arrays"
    with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=text):
        comm.Reduce(array, result, algorithm="chain")
    array, result = xp.ones(5, np.float32), xp.zeros(5, np.float32)
    with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=text):
        comm.Reduce(array, result, mpicomm.AVG, algorithm="chain")
    if comm.size > 2:
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=text):
            comm.Reduce(array, result, root=1, algorithm="chain")
    with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match="is for Bcast, Reduce, not Allreduce"):
        comm.Allreduce(array, result, algorithm="chain")
    comm.Reduce(array, result)
    comm.check()
    assert to_host(result).tolist() == [comm.size if comm.rank == 0 else 0] * 5
