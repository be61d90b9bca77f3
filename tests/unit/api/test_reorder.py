from __future__ import annotations

from mpicomm.api.topologies import edges_of, edges_of_grid


def test_edges_of_grids() -> None:
    assert edges_of_grid([3], [False], 3) == edges_of_grid([3], None, 4) == {(0, 1): 1, (1, 2): 1}
    assert edges_of_grid([3], [True], 3) == edges_of_grid([3], True, 3) == {(0, 1): 1, (1, 2): 1, (2, 0): 1}
    assert edges_of_grid([2, 2], [False, False], 4) == {(0, 1): 1, (2, 3): 1, (0, 2): 1, (1, 3): 1}
    assert edges_of_grid([2], [True], 2) == {(0, 1): 1, (1, 0): 1}


def test_edges_of_grids_that_mpi_refuses() -> None:
    for dims, periods in (([5], [True]), ([0], [True]), ([2, 2], [True]), ([1 << 40, 1 << 40], [True, True])):
        assert edges_of_grid(dims, periods, 4) == {}


def test_edges_of_neighbours() -> None:
    assert edges_of([([1], [1, 1], None, None), ([0, 0], [0], [7, 8], [4])]) == {(0, 1): 2, (1, 0): 4}
