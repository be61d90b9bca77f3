"""``reorder=True``: neighbours come to ranks that are linked well, and each place of a graph keeps its edges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.api import topologies
from tests.helpers.rigs.communicators import to_host


@pytest.fixture
def turned(comm: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An order of the ranks in which each has a fast link to the next one. All other links are slow.

    A graph with edges from each place to the next takes this order.
    """
    order = [1, 2, 0, *range(3, comm.size)] if comm.size > 2 else list(range(comm.size))
    fast = {frozenset(order[place : place + 2]) for place in range(comm.size - 1)}
    costs = [[1.0 if frozenset((a, b)) in fast else 10.0 for b in range(comm.size)] for a in range(comm.size)]
    monkeypatch.setattr(topologies, "costs_between", lambda *arguments: costs)
    return order


def fits(made: Any, comm: mpicomm.Communicator, order: list[int], xp: Any) -> None:
    """Require that ranks have the places of ``order``, or all of them backwards, and that calls work."""
    held = made.allgather(comm.rank)
    assert held in (order, order[::-1])
    sources = made.inedges
    received = xp.full(len(sources), -1.0)
    # Open MPI 5.0.11 waits for ever in Neighbor_allgather if a rank has neighbours in only one direction.
    made.Neighbor_allgatherv(xp.full(1, float(made.rank)), received)
    made.check()
    assert to_host(received).tolist() == [-1 if rank == MPI.PROC_NULL else rank for rank in sources]
    total = xp.zeros(1)
    made.Allreduce(xp.full(1, float(made.rank)), total)
    assert to_host(total)[0] == sum(range(made.size))
    assert made.describe().rank == made.rank
    made.Free()


def test_a_grid(comm: mpicomm.Communicator, xp: Any, turned: list[int]) -> None:
    line = comm.Create_cart([comm.size], [False], reorder=True)
    assert line.coords == [line.rank]
    fits(line, comm, turned, xp)


def test_ranks_beyond_the_grid(comm: mpicomm.Communicator, turned: list[int]) -> None:
    pair = comm.Create_cart([min(2, comm.size)], [False], reorder=True)
    if pair != MPI.COMM_NULL:
        held = pair.allgather(comm.rank)
        assert comm.size == 1 or abs(turned.index(held[0]) - turned.index(held[1])) == 1
        pair.Free()


@pytest.mark.parametrize("leading", [[], [0]])  # mpi4py takes both
def test_a_graph(comm: mpicomm.Communicator, xp: Any, turned: list[int], leading: list[int]) -> None:
    size = comm.size
    neighbors = [[peer for peer in (rank - 1, rank, rank + 1) if 0 <= peer < size] for rank in range(size)]
    index = np.cumsum([len(each) for each in neighbors]).tolist()
    graph: Any = comm.Create_graph([*leading, *index], [peer for each in neighbors for peer in each], reorder=True)
    assert graph.neighbors == neighbors[graph.rank]
    fits(graph, comm, turned, xp)


@pytest.mark.parametrize("weighted", [False, True])
def test_each_rank_passes_its_neighbours(
    comm: mpicomm.Communicator, xp: Any, turned: list[int], weighted: bool
) -> None:
    """The graph has edges to the next rank and a light edge from the last rank to the first."""

    def lists(rank: int) -> tuple[list[int], list[int], list[int], list[int]]:
        light = comm.size > 2 and weighted
        sources, destinations = [rank - 1] * (rank > 0), [rank + 1] * (rank < comm.size - 1)
        into, out = [100 + rank] * len(sources), [101 + rank] * len(destinations)
        if light and rank == 0:
            sources, into = [*sources, comm.size - 1], [*into, 1]
        if light and rank == comm.size - 1:
            destinations, out = [*destinations, 0], [*out, 1]
        return sources, destinations, into, out

    sources, destinations, into, out = lists(comm.rank)
    weights: dict[str, Any] = {"sourceweights": into, "destweights": out} if weighted else {}
    graph = comm.Create_dist_graph_adjacent(sources, destinations, **weights, reorder=True)
    of_place = lists(graph.rank)
    found = graph.Get_dist_neighbors()
    assert found[:2] == of_place[:2]
    if weighted and any(of_place[2:]):
        assert found[2] == of_place[2:]
    if comm.size < 3 or not weighted:
        fits(graph, comm, turned, xp)
    else:
        held = graph.allgather(comm.rank)
        assert held in (turned, turned[::-1])
        graph.Free()


@pytest.mark.parametrize("weighted", [False, True])
def test_each_rank_passes_any_edges(comm: mpicomm.Communicator, xp: Any, turned: list[int], weighted: bool) -> None:
    size = comm.size
    source = (comm.rank + 1) % size  # each rank passes an edge of another rank
    degree = int(source < size - 1)
    weights = [3] * degree if weighted else None
    graph: Any = comm.Create_dist_graph([source], [degree], [source + 1] * degree, weights, reorder=True)
    sources, destinations, _ = graph.Get_dist_neighbors()
    assert sources == [graph.rank - 1] * (graph.rank > 0)
    assert destinations == [graph.rank + 1] * (graph.rank < size - 1)
    fits(graph, comm, turned, xp)


def test_equal_links_keep_the_ranks(comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "costs_between", lambda *arguments: [[1.0] * comm.size] * comm.size)
    order = list(range(comm.size))
    for _ in range(2):
        fits(comm.Create_cart([comm.size], [True], reorder=True), comm, order, xp)
        fits(comm.Create_cart([comm.size], [True]), comm, order, xp)


def test_on_the_links_that_there_are(comm: mpicomm.Communicator, xp: Any) -> None:
    """On the cpu MPI decides, on GPUs the links do: whatever the order, each rank has the neighbours of its place."""
    size = comm.size
    ring: Any = comm.Create_dist_graph_adjacent([(comm.rank - 1) % size], [(comm.rank + 1) % size], reorder=True)
    assert ring.Get_dist_neighbors()[:2] == ([(ring.rank - 1) % size], [(ring.rank + 1) % size])
    fits(ring, comm, ring.allgather(comm.rank), xp)


def test_a_grid_that_is_too_large_is_refused(comm: mpicomm.Communicator, turned: list[int]) -> None:
    with pytest.raises(MPI.Exception):
        comm.Create_cart([comm.size + 1], [True], reorder=True)
