from __future__ import annotations

from mpi4py import MPI

from mpicomm.api.reorder import edges_of_graph, edges_of_grid, edges_of_lists, edges_of_parts, listed


def test_edges_of_grids() -> None:
    assert edges_of_grid([3], [False], 3) == edges_of_grid([3], None, 4) == {(0, 1): 1, (1, 2): 1}
    assert edges_of_grid([3], [True], 3) == edges_of_grid([3], True, 3) == {(0, 1): 1, (1, 2): 1, (2, 0): 1}
    assert edges_of_grid([2, 2], [False, False], 4) == {(0, 1): 1, (2, 3): 1, (0, 2): 1, (1, 3): 1}
    assert edges_of_grid([2], [True], 2) == {(0, 1): 1, (1, 0): 1}


def test_edges_of_grids_that_mpi_refuses() -> None:
    for dims, periods in (([5], [True]), ([0], [True]), ([2, 2], [True]), ([1 << 40, 1 << 40], [True, True])):
        assert edges_of_grid(dims, periods, 4) == {}


def test_edges_of_graphs() -> None:
    assert edges_of_graph([1, 3, 3], [1, 0, 2]) == {(0, 1): 1, (1, 0): 1, (1, 2): 1}
    assert edges_of_graph([0, 1, 3, 3], [1, 0, 2]) == edges_of_graph([1, 3, 3], [1, 0, 2])
    assert edges_of_graph([0, 0, 1], [1]) == {(1, 1): 1}
    assert edges_of_graph([], []) == {}


def test_edges_of_lists() -> None:
    lists = [([1], [1, 1], None, None), ([0, 0], [0], [7, 8], [4])]
    assert edges_of_lists(lists) == {(0, 1): 2, (1, 0): 4}


def test_edges_of_parts() -> None:
    parts = [([0, 2], [2, 1], [1, 2, 0], None), ([0], [1], [1], [5]), ([], [], [], [])]
    assert edges_of_parts(parts) == {(0, 1): 6, (0, 2): 1, (2, 0): 1}


def test_weights_are_the_same_on_all_ranks() -> None:
    assert listed(None) is listed(MPI.UNWEIGHTED) is None
    assert listed(MPI.WEIGHTS_EMPTY) == listed(()) == []
    assert listed((3, 4)) == [3, 4]
