"""Reductions in a promised order: order="tree" of any number of ranks, and communicators with reductions="ordered"."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, PeerError
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.communicator_calls import REDUCTIONS, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip, reduced, require_same
from tests.helpers.rigs.call_forms import complete
from tests.helpers.rigs.communicators import array_module, communicator, to_host
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
            for form in ("Iallreduce", "Allreduce_init"):
                made[:] = 0
                request = getattr(comm, form)(mine, made, order="tree")
                complete(request) if form.endswith("_init") else request.Wait()
                require_same(to_host(made), expected)
            root = size - 1
            comm.Reduce(mine, made if comm.rank == root else None, root=root, order="tree")
            if comm.rank == root:
                require_same(to_host(made), expected)
            in_place = mine.copy()
            comm.Allreduce(MPI.IN_PLACE, in_place, order="tree")
            require_same(to_host(in_place), expected)
            block = count // size
            part = xp.zeros(block, dtype)
            comm.Reduce_scatter_block(mine[: block * size].copy(), part, order="tree")
            require_same(to_host(part), expected[comm.rank * block : (comm.rank + 1) * block])
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


def test_refusals(device: str) -> None:
    with communicator(device) as comm, array_module(comm) as xp:
        x, y = xp.zeros(4, "float32"), xp.zeros(4, "float32")
        refused: list[tuple[dict[str, Any], str]] = [
            ({"order": "rank"}, 'order=\'rank\' of Allreduce: use "auto" or "tree"')
        ]
        if 64 % comm.size:
            refused = [
                ({"order": "tree"}, f"{comm.size} ranks cannot hold 64 leaves in equal blocks: use 1, 2, 4, ...")
            ]
        else:
            refused += [
                ({"order": "tree", "op": MPI.MAX}, "is for op=MPI.SUM, and op is max"),
                ({"order": "tree", "op": mpicomm.AVG}, "and op is avg"),
                ({"order": "tree", "algorithm": "mpi"}, 'MPI has no order="tree"'),
                ({"order": "tree", "algorithm": "ring"}, "the ring is no tree"),
                ({"order": "tree", "wire_dtype": "int8"}, "and op is tree"),
            ]
        for how, words in refused:
            with raises_everywhere(comm, InvalidUsageError) as caught:
                comm.Allreduce(x, y, **how)
            assert words in str(caught.value)
        long_double = np.zeros(4, np.longdouble)
        with raises_everywhere(
            comm, InvalidUsageError, match="equal blocks" if 64 % comm.size else 'has no order="tree"'
        ):
            comm.Allreduce(long_double, long_double.copy(), order="tree")
        assert all(
            "order" in inspect.signature(getattr(comm, form)).parameters for form in OPERATIONS["Reduce"].methods
        )


@pytest.mark.mpi(min_size=2)
def test_ranks_with_different_orders_are_told(device: str) -> None:
    size = SIZES[-1]
    comm = few(device, size)
    if comm is None:
        return
    with array_module(comm) as xp:
        x, y = xp.zeros(1 << 20, "float32"), xp.zeros(1 << 20, "float32")
        with pytest.raises(PeerError) as caught:
            comm.Allreduce(x, y, order="tree" if comm.rank == 0 else "auto")
            comm.check()
    assert "op=tree" in str(caught.value) and "op=sum" in str(caught.value)
    comm.Free()


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


def test_what_only_mpi_has_goes_to_mpi(ordered: mpicomm.Communicator) -> None:
    pair = np.zeros(1, np.dtype([("value", "f8"), ("rank", "i4")], align=True))
    pair["value"], pair["rank"] = ordered.rank, ordered.rank
    found = np.zeros_like(pair)
    ordered.Allreduce([pair, 1, MPI.DOUBLE_INT], [found, 1, MPI.DOUBLE_INT], MPI.MAXLOC)
    assert found["rank"] == ordered.size - 1
