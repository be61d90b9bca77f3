"""A rank does not come to a call that makes a communicator: the others name it in time."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import cast

import pytest
from mpi4py import MPI

import mpicomm
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.rigs.communicators import communicator, patience_s

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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", MAKERS)
def test_a_missing_rank_is_named_and_the_communicator_stays_usable(name: str) -> None:
    world = MPI.COMM_WORLD
    culprit = world.size - 1
    whole = communicator("cpu", timeout_s=patience_s("cpu"))
    comm = cast(mpicomm.Communicator, whole.Create_cart([whole.size])) if name == "Sub" else whole
    others = world.Split(MPI.UNDEFINED if world.rank == culprit else 0)
    text = f"^{name}: rank {culprit} did not arrive within {patience_s('cpu'):g} s"
    if others != MPI.COMM_NULL:
        with raises_everywhere(others, mpicomm.CollectiveTimeoutError, match=text) as raised:
            MAKERS[name](comm)
        assert raised.value.ranks == (culprit,)
        others.Free()
    world.Barrier()
    if world.rank == culprit:  # it comes late
        with pytest.raises(mpicomm.CollectiveTimeoutError, match=text):
            MAKERS[name](comm)
    made = MAKERS[name](comm)
    assert made.allreduce(1) == world.size
    made.Free()
    comm.Free()
    whole.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("culprit", [0, -1])
def test_a_rank_may_miss_any_of_many_calls(culprit: int) -> None:
    world = MPI.COMM_WORLD
    culprit %= world.size
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    for _ in range(2):
        for _ in range(3):
            made = comm.Dup()
            assert made.allreduce(1) == world.size
            made.Free()
        world.Barrier()
        if world.rank != culprit:
            with pytest.raises(mpicomm.CollectiveTimeoutError, match=f"^Dup: rank {culprit} did not arrive") as raised:
                comm.Dup()
            assert raised.value.ranks == (culprit,)
        world.Barrier()
        if world.rank == culprit:
            with pytest.raises(mpicomm.CollectiveTimeoutError, match=f"^Dup: rank {culprit} did not arrive"):
                comm.Dup()
        world.Barrier()
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_a_missing_rank_of_a_group_is_named() -> None:
    world = MPI.COMM_WORLD
    comm = communicator("cpu", timeout_s=patience_s("cpu"))
    everyone, first = comm.Get_group(), comm.Get_group().Incl([0])
    pairs = [everyone.Incl([0, rank]) for rank in range(1, world.size)]
    for _ in range(3):  # groups that share a rank do not mix
        for pair in pairs:
            if pair.rank != MPI.UNDEFINED:
                made = comm.Create_group(pair)
                assert made.size == 2
                made.Free()
    if world.rank == 0:
        alone = comm.Create_group(first)
        assert alone.size == 1
        alone.Free()
        text = re.escape("Create_group: rank 1 did not arrive within")
        with pytest.raises(mpicomm.CollectiveTimeoutError, match=text) as raised:
            comm.Create_group(pairs[0])
        assert raised.value.ranks == (1,)
    world.Barrier()
    if world.rank == 1:
        with pytest.raises(mpicomm.CollectiveTimeoutError):
            comm.Create_group(pairs[0])
    world.Barrier()
    if world.rank in (0, 1):  # its messages could meet messages of the call before
        with pytest.raises(mpicomm.CollectiveTimeoutError, match="rank 1 did not arrive"):
            comm.Create_group(pairs[0])
    comm.Split().Free()
    for group in (everyone, first, *pairs):
        group.Free()
    comm.Free()
