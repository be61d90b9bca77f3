"""Communicators with a topology: Communicators with MPI's calls for it."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.api import topologies
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.rigs.communicators import to_host


def ring(comm: mpicomm.Communicator) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def works(made: Any, xp: Any) -> None:
    """Require that a communicator is a Communicator: its calls on arrays, its memory and its own children work."""
    assert isinstance(made, mpicomm.Communicator)
    total = xp.zeros(5)
    made.Allreduce(xp.full(5, made.rank + 1.0), total)
    np.testing.assert_array_equal(to_host(total), np.full(5, made.size * (made.size + 1) / 2))
    got, following, previous = xp.zeros(3), (made.rank + 1) % made.size, (made.rank - 1) % made.size
    made.Sendrecv(xp.full(3, float(made.rank)), following, 0, got, previous, 0)
    np.testing.assert_array_equal(to_host(got), np.full(3, float(previous)))
    with made.zeros(made.size, np.int64) as array:
        array.peer(following)[made.rank] = 7
        made.check()
        made.Barrier()
        assert to_host(array.local)[previous] == 7


def test_a_grid(comm: mpicomm.Communicator, xp: Any) -> None:
    grid = comm.Create_cart(MPI.Compute_dims(comm.size, 2), [True, False])
    assert isinstance(grid, MPI.Cartcomm)
    assert grid.Get_topology() == MPI.CART
    assert grid.dim == 2
    assert grid.Get_cart_rank(grid.coords) == grid.rank
    assert repr(grid).startswith(f"<mpicomm.CartCommunicator rank {grid.rank} of {grid.size} ")
    works(grid, xp)
    duplicate, request = grid.Idup()
    request.Wait()
    for made in (grid.Dup(), grid.Clone(), duplicate):
        assert isinstance(made, MPI.Cartcomm)
        assert made.dims == grid.dims
        works(made, xp)
        made.Free()
    row = grid.Sub([False, True])
    assert isinstance(row, MPI.Cartcomm)
    assert row.dims == grid.dims[1:]
    works(row, xp)
    half = row.Split(0, row.rank)
    assert isinstance(half, mpicomm.Communicator)
    assert not isinstance(half, MPI.Topocomm)
    works(half, xp)
    half.Free()
    row.Free()
    again = mpicomm.Communicator(grid, device=comm.device, timeout_s=20)
    assert isinstance(again, MPI.Cartcomm)
    assert again.coords == grid.coords
    again.Free()
    grid.Free()
    with pytest.raises(InvalidUsageError, match="freed"):
        grid.Barrier()


def test_graphs(comm: mpicomm.Communicator, xp: Any) -> None:
    left, right = ring(comm)
    size = comm.size
    edges = [peer for rank in range(size) for peer in ((rank - 1) % size, (rank + 1) % size)]
    graph = comm.Create_graph([2 * rank + 2 for rank in range(size)], edges)
    assert isinstance(graph, MPI.Graphcomm)
    assert graph.neighbors == [left, right]
    adjacent = comm.Create_dist_graph_adjacent([left, right], [left, right])
    assert isinstance(adjacent, MPI.Distgraphcomm)
    assert adjacent.Get_dist_neighbors()[:2] == ([left, right], [left, right])
    anywhere = comm.Create_dist_graph([comm.rank], [1], [right])
    assert isinstance(anywhere, MPI.Distgraphcomm)
    assert anywhere.Get_dist_neighbors()[:2] == ([left], [right])
    for made in (graph, adjacent, anywhere):
        works(made, xp)
        made.Free()


def test_lists_of_neighbours_that_do_not_match_are_refused(comm: mpicomm.Communicator) -> None:
    left, right = ring(comm)
    sources = [left, left] if comm.rank == 0 else [left]
    text = r"rank 0: rank \d names rank 0 1 times .* and this rank names rank \d 2 times"
    with pytest.raises(InvalidUsageError, match=text):
        comm.Create_dist_graph_adjacent(sources, [right])
    made = comm.Create_dist_graph_adjacent([left], [right])  # the ranks go on
    made.Free()


ADJACENT, ANYWHERE, GRAPH = "Create_dist_graph_adjacent", "Create_dist_graph", "Create_graph"
NO_RANK = "is no rank of the communicator: use 0 to "
BAD: list[tuple[str, dict[str, Any], str]] = [
    (ADJACENT, {"sources": [77]}, f"sources[0]=77 {NO_RANK}"),
    (ADJACENT, {"sources": [-7]}, f"sources[0]=-7 {NO_RANK}"),
    (ADJACENT, {"destinations": [0, 77]}, f"destinations[1]=77 {NO_RANK}"),
    (ADJACENT, {"sources": ["a"]}, "sources=['a']: pass integers"),
    (ADJACENT, {"sourceweights": [1, 2]}, "sourceweights has 2 items: pass 1"),
    (ADJACENT, {"destweights": 2.5}, "'float' object is not iterable"),
    (ADJACENT, {"destweights": []}, "destweights has 0 items: pass 1"),
    (ANYWHERE, {"destinations": [99]}, f"destinations[0]=99 {NO_RANK}"),
    (ANYWHERE, {"destinations": [MPI.PROC_NULL]}, f"destinations[0]={MPI.PROC_NULL} {NO_RANK}"),
    (ANYWHERE, {"sources": [-7]}, f"sources[0]=-7 {NO_RANK}"),
    (ANYWHERE, {"degrees": [1, 1], "destinations": [0, 0]}, "degrees has 2 items: pass 1"),
    (
        ANYWHERE,
        {"sources": [0, 0], "degrees": [3, -1], "destinations": [0, 0]},
        "degrees=[3, -1] has a negative number: pass 0 or more",
    ),
    (ANYWHERE, {"degrees": [2]}, "destinations has 1 items: pass 2"),
    (ANYWHERE, {"weights": [1, 2]}, "weights has 2 items: pass 1"),
    (GRAPH, {"edges": [77]}, f"edges[0]=77 {NO_RANK}0"),
    (GRAPH, {"edges": [-1]}, f"edges[0]=-1 {NO_RANK}0"),
    (GRAPH, {"index": [2]}, "edges has 1 items, but index says 2: pass all of them"),
    (GRAPH, {"index": [-1], "edges": []}, "index=[-1] goes down to -1: pass the sums of the numbers of neighbours"),
    (GRAPH, {"index": ["a"]}, "index=['a']: pass integers"),
    (GRAPH, {"index": range(1, 100), "edges": [0] * 99}, "index has 99 ranks, but the communicator has"),
]
"""Lists of a call that are bad on one rank, and its error."""


def test_a_bad_list_of_one_rank_is_every_ranks_error(host_comm: mpicomm.Communicator) -> None:
    left, right = ring(host_comm)
    for number, (call, bad, text) in enumerate(BAD):
        good: dict[str, Any] = {"sources": [left], "destinations": [right]}
        if call == ANYWHERE:
            good = {"sources": [host_comm.rank], "degrees": [1], "destinations": [0]}
        elif call == GRAPH:
            good = {"index": [1], "edges": [0]}
        culprit = number % host_comm.size
        said = f"^{call}: rank {culprit}: {re.escape(text)}"
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=said) as raised:
            getattr(host_comm, call)(**{**good, **(bad if host_comm.rank == culprit else {})})
        assert raised.value.ranks == (culprit,)


def test_a_neighbour_may_be_none(host_comm: mpicomm.Communicator) -> None:
    none: Any = np.array([MPI.PROC_NULL, host_comm.rank])
    if "Open MPI" in MPI.Get_library_version():  # there MPI's collective ends the program
        with pytest.raises(InvalidUsageError, match=r"sources\[0\] is MPI.PROC_NULL, .*: leave it out"):
            host_comm.Create_dist_graph_adjacent(none, none, [1, 2], [2, 1])
        return
    graph = host_comm.Create_dist_graph_adjacent(none, none, [1, 2], [2, 1])
    got = np.zeros(2)
    graph.Neighbor_alltoall(np.array([5.0, 6.0]), got)
    np.testing.assert_array_equal(got, [0, 6])
    graph.Free()


def test_a_graph_whose_neighbours_do_not_match_has_no_collectives_of_them(comm: mpicomm.Communicator, xp: Any) -> None:
    size = comm.size
    if size == 1:
        pytest.skip("one rank is its own neighbour")
    edges = [peer for peer in range(size) if peer != 0]  # rank 0 has all others as neighbours, which have none
    graph = comm.Create_graph([len(edges)] * size, edges)
    works(graph, xp)
    neighbours = len(graph.neighbors)
    text = "graph names rank 1 1 times as a neighbour of rank 0, and rank 0 0 "
    for begin in (graph.Neighbor_alltoall, graph.Ineighbor_alltoall, graph.Neighbor_alltoall_init):
        with raises_everywhere(MPI.COMM_WORLD, InvalidUsageError, match=text):
            begin(xp.zeros(neighbours), xp.zeros(neighbours))
    works(graph, xp)
    graph.Free()


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


def test_a_grid_in_the_order_of_links(comm: mpicomm.Communicator, xp: Any, turned: list[int]) -> None:
    line = comm.Create_cart([comm.size], [False], reorder=True)
    assert line.coords == [line.rank]
    fits(line, comm, turned, xp)


@pytest.mark.parametrize("reorder", [False, True])
def test_ranks_beyond_a_grid_have_no_communicator(
    comm: mpicomm.Communicator, xp: Any, turned: list[int], reorder: bool
) -> None:
    pair = comm.Create_cart([min(2, comm.size)], [False], reorder=reorder)
    assert comm.allgather(pair != MPI.COMM_NULL).count(True) == min(2, comm.size)
    if pair != MPI.COMM_NULL:
        places = [turned.index(rank) if reorder else rank for rank in pair.allgather(comm.rank)]
        assert max(places) - min(places) == pair.size - 1 and (reorder or places[0] == 0)
        works(pair, xp)
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
@pytest.mark.parametrize("call", [ADJACENT, ANYWHERE])
def test_a_graph_of_neighbours_or_edges(
    comm: mpicomm.Communicator, xp: Any, turned: list[int], call: str, weighted: bool
) -> None:
    size, rank = comm.size, comm.rank
    weights = {(source, source + 1): 101 + source for source in range(size - 1)}
    if weighted and size > 2:
        weights[size - 1, 0] = 1  # it counts for little

    def lists(place: int) -> tuple[dict[int, int], dict[int, int]]:
        into = {source: weight for (source, target), weight in weights.items() if target == place}
        return into, {target: weight for (source, target), weight in weights.items() if source == place}

    given: dict[str, Any]
    if call == ADJACENT:
        into, out = lists(rank)
        given = {"sources": [*into], "destinations": [*out]}
        of_edges: dict[str, Any] = {"sourceweights": [*into.values()], "destweights": [*out.values()]}
    else:
        source = (rank + 1) % size  # each rank passes an edge of another rank
        out = lists(source)[1]
        given = {"sources": [source], "degrees": [len(out)], "destinations": [*out]}
        of_edges = {"weights": [*out.values()]}
    graph: Any = getattr(comm, call)(**given, **(of_edges if weighted else {}), reorder=True)
    into, out = lists(graph.rank)
    found = graph.Get_dist_neighbors()
    assert found[:2] == ([*into], [*out])
    assert not (weighted and (into or out)) or found[2] == ([*into.values()], [*out.values()])
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
