"""A rank comes after the others have given up: they name it, it raises as they did, and nobody waits for ever."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError
from tests.helpers.faults.setup_failures import FIRST_AND_LAST, WORLD
from tests.helpers.jobs.pace import stretched
from tests.helpers.rigs.communicators import communicator, patience_s

TIMEOUT_S = 0.5
MAKERS: dict[str, Callable[[mpicomm.Communicator], MPI.Comm]] = {
    "Dup": lambda comm: comm.Dup(),
    "Dup_with_info": lambda comm: comm.Dup_with_info(MPI.INFO_NULL),
    "Clone": lambda comm: comm.Clone(),
    "Split": lambda comm: comm.Split(0, comm.rank),
    "Split_type": lambda comm: comm.Split_type(MPI.COMM_TYPE_SHARED),
    "Create": lambda comm: comm.Create(comm.Get_group()),
    "Create_cart": lambda comm: comm.Create_cart([comm.size]),
    "Create_graph": lambda comm: comm.Create_graph(range(1, comm.size + 1), [*range(1, comm.size), 0]),
    "Create_dist_graph": lambda comm: comm.Create_dist_graph([], [], []),
    "Create_dist_graph_adjacent": lambda comm: comm.Create_dist_graph_adjacent([], []),
    "Sub": lambda comm: cast(MPI.Cartcomm, comm).Sub([True]),
}
"""Calls that make a communicator; after a timeout they can be made again."""


def create_group(comm: mpicomm.Communicator) -> None:
    comm.Create_group(comm.Get_group())


def multiply(name: str) -> Callable[[mpicomm.Communicator], Any]:
    return lambda comm: getattr(comm, name)(np.ones((4 * comm.size, 4)), np.ones((4, 2)))


def reduce_in_shared_memory(comm: mpicomm.Communicator) -> None:
    comm.Allreduce(np.ones(64), np.empty(64), algorithm="one_shot")


OTHERS: dict[str, Callable[[mpicomm.Communicator], Any]] = {
    "Create_group": create_group,
    "suspend": lambda comm: comm.suspend(),
    "Allreduce": reduce_in_shared_memory,
    "allgather_matmul": multiply("allgather_matmul"),
    "matmul_reduce_scatter": multiply("matmul_reduce_scatter"),
    "matmul_allreduce": multiply("matmul_allreduce"),
}
# test_setup_missing_ranks.py has the memory, the end and the making of a Communicator.
CASES = [*((name, FIRST_AND_LAST[-1]) for name in MAKERS), *itertools.product(OTHERS, FIRST_AND_LAST)]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("name", "late"), CASES)
def test_a_rank_that_comes_after_the_others_have_given_up_raises_as_they_did(device: str, name: str, late: int) -> None:
    whole = communicator(device, timeout_s=stretched(TIMEOUT_S))
    comm = cast(mpicomm.Communicator, whole.Create_cart([whole.size])) if name == "Sub" else whole
    if name in OTHERS:
        reduce_in_shared_memory(comm)  # sets up the memory of later calls
    call, text = OTHERS.get(name), f"rank {late} did not|rank {late} has not"
    if call is None:
        call, text = MAKERS[name], f"^{name}: rank {late} did not arrive within {stretched(TIMEOUT_S):g} s"
    if WORLD.rank == late:
        WORLD.Barrier()
    with pytest.raises(CollectiveTimeoutError, match=text) as raised:
        call(comm)
    if WORLD.rank != late:
        assert name in OTHERS or raised.value.ranks == (late,)
        WORLD.Barrier()
    WORLD.Barrier()  # a communicator that is still whole waits in Free for ranks that are late
    if name in MAKERS:
        made = call(comm)
        assert made.allreduce(1) == WORLD.size
        made.Free()
    comm.Free()
    whole.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", [0, -1])
def test_a_rank_may_miss_any_of_many_calls(culprit: int) -> None:
    culprit %= WORLD.size
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    for _ in range(2):
        for _ in range(3):
            made = comm.Dup()
            assert made.allreduce(1) == WORLD.size
            made.Free()
        WORLD.Barrier()
        if WORLD.rank != culprit:
            with pytest.raises(CollectiveTimeoutError, match=f"^Dup: rank {culprit} did not arrive") as raised:
                comm.Dup()
            assert raised.value.ranks == (culprit,)
        WORLD.Barrier()
        if WORLD.rank == culprit:
            with pytest.raises(CollectiveTimeoutError, match=f"^Dup: rank {culprit} did not arrive"):
                comm.Dup()
        WORLD.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_a_missing_rank_of_a_group_is_named() -> None:
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    everyone, first = comm.Get_group(), comm.Get_group().Incl([0])
    pairs = [everyone.Incl([0, rank]) for rank in range(1, WORLD.size)]
    for _ in range(3):  # groups that share a rank do not mix
        for pair in pairs:
            if pair.rank != MPI.UNDEFINED:
                made = comm.Create_group(pair)
                assert made.size == 2
                made.Free()
    if WORLD.rank == 0:
        alone = comm.Create_group(first)
        assert alone.size == 1
        alone.Free()
        text = re.escape("Create_group: rank 1 did not arrive within")
        with pytest.raises(CollectiveTimeoutError, match=text) as raised:
            comm.Create_group(pairs[0])
        assert raised.value.ranks == (1,)
    WORLD.Barrier()
    if WORLD.rank == 1:
        with pytest.raises(CollectiveTimeoutError):
            comm.Create_group(pairs[0])
    WORLD.Barrier()
    if WORLD.rank in (0, 1):  # its messages could meet messages of the call before
        with pytest.raises(CollectiveTimeoutError, match="rank 1 did not arrive"):
            comm.Create_group(pairs[0])
    comm.Split().Free()
    for group in (everyone, first, *pairs):
        group.Free()
    comm.Free()


@pytest.mark.mpi(min_size=3)
def test_the_words_of_a_call_that_ranks_never_make_reach_no_other_communicator() -> None:
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    if WORLD.rank == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"^Dup: rank"):
            comm.Dup()
    WORLD.Barrier()
    comm.Free()
    others = WORLD.Create_group(WORLD.Get_group().Excl([0]))  # MPI would give it the number of the freed communicator
    strays = WORLD.rank > 0 and any(others.Iprobe(rank, MPI.ANY_TAG) for rank in range(others.size))
    assert not WORLD.allreduce(strays, MPI.LOR)
    if WORLD.rank > 0:
        others.Free()
