"""Reductions in a promised order: order="tree" of any number of ranks, and communicators with reductions="ordered".

test_random_collectives.py has more calls of a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.communicator_calls import REDUCTIONS, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip, reduced, require_same
from tests.helpers.rigs.call_forms import complete
from tests.helpers.rigs.communicators import array_module, to_host
from tests.helpers.rigs.hosts_by_name import groups_of, on_hosts

WORLD = MPI.COMM_WORLD
LEAVES = 8
SIZES = [size for size in (1, 2, 4, 8) if size <= WORLD.size]
COUNTS = (1, 1000, 300_001)  # the last one goes through mapped memory without order=, too


def leaves_of(dtype: np.dtype[Any], count: int, seed: int = 0) -> list[Any]:
    """Leaves whose sum depends on the order, the same on all ranks."""
    rng = np.random.default_rng([seed, count])
    shape = (LEAVES, count)
    if dtype.kind in "iu":
        return list(rng.integers(-100, 100, shape).astype(dtype))
    values = rng.standard_normal(shape) * 10.0 ** rng.integers(-3, 4, shape)
    return list((values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype))


def few(device: str, size: int, leaves: int = LEAVES) -> mpicomm.Communicator | None:
    """Return a Communicator of the first ranks; None on the others. Collective."""
    part = WORLD.Split(int(WORLD.rank >= size), WORLD.rank)
    try:
        if WORLD.rank >= size:
            return None
        chosen: Any = "cpu" if device == "cpu" else "auto"
        assert isinstance(part, MPI.Intracomm)
        return mpicomm.Communicator(part, device=chosen, timeout_s=stretched(20), leaves=leaves)
    finally:
        part.Free()


def own_sum(comm: mpicomm.Communicator, xp: Any, leaves: list[Any]) -> Any:
    own = comm.leaves // comm.size
    return mpicomm.tree_sum(xp.asarray(np.stack(leaves[comm.rank * own : (comm.rank + 1) * own])))


@pytest.mark.parametrize("name", ["float32", "float64", "complex64", "int16"])
@pytest.mark.parametrize("size", SIZES)
def test_any_number_of_ranks_gets_the_same_bits(device: str, size: int, name: str) -> None:
    comm = few(device, size)
    if comm is None:
        return
    dtype = np.dtype(name)
    with comm, array_module(comm) as xp:
        assert comm.leaves == LEAVES
        for seed, count in enumerate(COUNTS):
            leaves = leaves_of(dtype, count, seed)
            expected, mine, made = reduced("tree", leaves), own_sum(comm, xp, leaves), xp.zeros(count, dtype)
            for algorithm in ("auto", "one_shot", "two_shot"):
                made[:] = 0
                comm.Allreduce(mine, made, order="tree", algorithm=algorithm)
                require_same(to_host(made), expected)
        comm.check()


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("size", SIZES)
def test_narrow_leaves_are_rounded_once(device: str, size: int, name: str) -> None:
    dtype = dtype_or_skip(name)
    if device != "cpu" and name != "float16":
        pytest.skip("CuPy lacks the type")
    comm = few(device, size)
    if comm is None:
        return
    with comm, array_module(comm) as xp:
        leaves = leaves_of(dtype, 1000)
        mine, made = own_sum(comm, xp, leaves), xp.zeros(1000, dtype)
        assert mine.dtype == np.float32
        comm.Allreduce(mine, made, order="tree", epilogue="v")
        require_same(to_host(made), reduced("tree", leaves))
        with raises_everywhere(comm, InvalidUsageError, match="mpicomm.tree_sum returns"):
            comm.Allreduce(made, xp.zeros_like(made), order="tree")


@pytest.mark.parametrize("placement", ["in order", "in turns"])
def test_peer_domains(device: str, placement: str) -> None:
    size = WORLD.size
    with on_hosts(placement, device) as comm, array_module(comm) as xp:
        leaves = leaves_of(np.dtype(np.float32), 1000)
        groups = groups_of(placement, size, str(comm.device))
        mine, made = xp.asarray(leaves[comm.rank]), xp.zeros(1000, "float32")
        if 64 % size or [rank for ranks in groups for rank in ranks] != list(range(size)):
            with raises_everywhere(comm, InvalidUsageError, match="equal blocks|follow each other"):
                comm.Allreduce(mine, made, order="tree")
            return
        for algorithm in ("auto", "one_shot", "two_shot"):
            comm.Allreduce(mine, made, order="tree", algorithm=algorithm)
            require_same(to_host(made), reduced("tree", leaves[:size]))


def test_children_have_the_leaves() -> None:
    with mpicomm.Communicator(WORLD, device="cpu", leaves=16) as comm, comm.Dup() as child:
        assert child.leaves == 16


@pytest.fixture(params=["argument", "environment", "child"])
def ordered(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[mpicomm.Communicator]:
    how: dict[str, Any] = {} if request.param == "environment" else {"reductions": "ordered"}
    if request.param == "environment":
        monkeypatch.setenv("MPICOMM_REDUCTIONS", "ordered")
    with mpicomm.Communicator(MPI.COMM_WORLD, device="cpu", **how) as comm:
        assert comm.describe().reductions == "ordered"
        if request.param != "child":
            yield comm
            return
        with comm.Dup() as child:
            yield child


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_all_ranks_have_the_bits_of_rank_order(ordered: mpicomm.Communicator, op: str) -> None:
    for operation, count, way in itertools.product(REDUCTIONS, (1, 5, 1000), ("run", "start", "prepare")):
        case = Case(operation, np.dtype(np.float64), count, op, form="any", wild=True)
        prepared = Prepared(case, ordered.rank, ordered.size, np)
        complete(getattr(prepared, way)(ordered))
        prepared.check()
