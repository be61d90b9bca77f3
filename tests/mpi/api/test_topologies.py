"""Communicators with a topology: Communicators with MPI's calls for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.communicators import to_host


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
    for made in (grid.Dup(), grid.Clone()):
        assert isinstance(made, MPI.Cartcomm)
        assert made.dims == grid.dims
        works(made, xp)
        made.Free()
    duplicate, request = grid.Idup()
    request.Wait()
    assert isinstance(duplicate, MPI.Cartcomm)
    works(duplicate, xp)
    duplicate.Free()
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


def test_ranks_beyond_the_grid_have_no_communicator(comm: mpicomm.Communicator, xp: Any) -> None:
    grid = comm.Create_cart([1])
    assert (grid == MPI.COMM_NULL) == (comm.rank > 0)
    if comm.rank == 0:
        works(grid, xp)
        grid.Free()


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


def test_collectives_of_neighbours(comm: mpicomm.Communicator, xp: Any) -> None:
    left, right = ring(comm)
    graph = comm.Create_dist_graph_adjacent([left], [right])
    got = xp.zeros(4)
    for begin in (
        lambda: graph.Neighbor_allgather(xp.full(4, float(comm.rank)), got),
        lambda: graph.Ineighbor_alltoall(xp.full(4, float(comm.rank)), got).Wait(),
        lambda: graph.Neighbor_alltoallv([xp.full(4, float(comm.rank)), [4]], [got, [4]]),
    ):
        got[:] = -1
        begin()
        np.testing.assert_array_equal(to_host(got), np.full(4, float(left)))
    graph.Free()


def test_lists_of_neighbours_that_do_not_match_are_refused(comm: mpicomm.Communicator) -> None:
    left, right = ring(comm)
    sources = [left, left] if comm.rank == 0 else [left]
    with pytest.raises(InvalidUsageError, match=r"rank \d names rank 0 1 times .* rank 0 names rank \d 2 times"):
        comm.Create_dist_graph_adjacent(sources, [right])
    made = comm.Create_dist_graph_adjacent([left], [right])  # the ranks go on
    made.Free()
