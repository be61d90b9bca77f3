"""Ranks that call different collectives, or do not come: the errors of all ranks name them."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.communicator_calls import Case, Prepared, require_works
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

FLOAT32 = np.dtype(np.float32)
LARGE = 1 << 20  # elements: mapped memory in any case

DIFFERENT: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # The difference: operation, the arguments of rank 0, the arguments of the others.
    "operation": ("", {"operation": "Allreduce"}, {"operation": "Scan"}),
    "count": ("Allreduce", {"count": 5}, {"count": 7}),
    "large count": ("Allreduce", {"count": 5}, {"count": LARGE}),
    "dtype": ("Allreduce", {"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}),
    "bytes of movement": ("Allgather", {"dtype": np.dtype(np.float64), "count": 4}, {"dtype": FLOAT32, "count": 9}),
    "op": ("Allreduce", {"op": "sum"}, {"op": "max"}),
    "expression": ("Allreduce", {"op": "sum"}, {"op": "a * 2 - b"}),
    "algorithm": ("Allreduce", {"algorithm": "one_shot"}, {"algorithm": "two_shot"}),
    "ring": ("Allreduce", {"algorithm": "one_shot"}, {"algorithm": "ring"}),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told_who_said_what(device: str, what: str) -> None:
    operation, first, others = DIFFERENT[what]
    comm = communicator(device, timeout_s=stretched(10.0))
    arguments = {"operation": operation, "dtype": FLOAT32, "count": 5, "algorithm": "one_shot"}
    text = told_on_every_rank(comm, Case(**{**arguments, **(first if comm.rank == 0 else others)}))
    if operation == "Allgather":  # collectives move bytes
        first, others = ({"count": each["count"] * each["dtype"].itemsize} for each in (first, others))
    named = ("count", "op", "root", "algorithm")
    said = {f"{name}={value}" for name, value in (*first.items(), *others.items()) if name in named}
    said |= {str(each[name]) for each in (first, others) for name in each if name in ("operation", "dtype")}
    assert all(word in text for word in said), f"{said} are not all in: {text}"
    assert all(f"rank {rank}: " in text for rank in range(comm.size)), text
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["Bcast", "Gather", "Reduce", "Scatter"])
def test_different_roots_are_an_error_on_all_ranks(device: str, operation: str) -> None:
    # Some ranks wait for each other, until their time is up, or until another rank tells them.
    comm = communicator(device, timeout_s=HANG_S)
    text = told_on_every_rank(comm, Case(operation, FLOAT32, 5, root=min(comm.rank, 1), algorithm="one_shot"))
    for rank in range(comm.size):
        assert re.search(rf"rank {rank}: {operation}\([^)]*root={min(rank, 1)}[,)]", text), text
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("expected", [4, 6, 10**7])
def test_two_ranks_that_disagree_on_counts_are_told(device: str, expected: int) -> None:
    comm = communicator(device, timeout_s=stretched(10.0))
    rank, size = comm.rank, comm.size
    sent, received = [5] * size, [5] * size
    if rank == size - 1:
        received[0] = expected
    with array_module(comm) as xp:
        blocks, target = xp.zeros(sum(sent), FLOAT32), xp.zeros(sum(received), FLOAT32)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), rank, size, xp)
        told = "rank . sent data of another call|rank 0 sends 20 bytes, but"
        with pytest.raises(PeerError, match=told):
            comm.Alltoallv([blocks, sent], [target, received], algorithm="one_shot")
            comm.check()
            after.run(comm)  # as above
            comm.check()
        require_unusable(comm, after, PeerError)
    comm.Free()
    require_a_new_one_works(device)


def told_on_every_rank(comm: mpicomm.Communicator, case: Case) -> str:
    """Return the error of all ranks when each calls its ``case``; the communicator is unusable then."""
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError, match=r"ranks called different things: rank 0: ") as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)  # a rank that had nothing to wait for is told at its next call
            comm.check()
        require_unusable(comm, after, PeerError)
    return str(info.value)


def require_unusable(comm: mpicomm.Communicator, prepared: Prepared, error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            prepared.run(comm)
            comm.check()


def require_a_new_one_works(device: str) -> None:
    with communicator(device) as new, array_module(new) as xp:
        require_works(new, xp)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("operation", ["Allreduce", "Alltoall"])
def test_a_rank_that_does_not_come_is_named(device: str, operation: str) -> None:
    comm = communicator(device, timeout_s=patience_s(device))
    missing = 0
    with array_module(comm) as xp:
        require_works(comm, xp)
        prepared = Prepared(Case(operation, FLOAT32, 1001, algorithm="one_shot"), comm.rank, comm.size, xp)
        if comm.rank != missing:
            with pytest.raises(CollectiveTimeoutError, match=f"rank {missing}") as info:
                prepared.run(comm)
                comm.check()
            assert info.value.ranks == (missing,)
        MPI.COMM_WORLD.Barrier()
        # The rank that comes too late learns it, and so do the others again.
        with pytest.raises(CollectiveTimeoutError, match=f"rank {missing}") as info:
            prepared.run(comm)
            comm.check()
        assert info.value.ranks == (missing,)
        require_unusable(comm, prepared, CollectiveTimeoutError)
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
def test_other_communicators_go_on_when_one_is_unusable(device: str) -> None:
    with communicator(device) as good, array_module(good) as xp:
        child = good.Dup()
        require_works(child, xp)
        case = Case("Allreduce", FLOAT32, 5 + good.rank, algorithm="one_shot")
        prepared = Prepared(case, good.rank, good.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError):
            prepared.run(child)
            child.check()
        require_works(good, xp)
        child.Free()
        require_works(good, xp)
