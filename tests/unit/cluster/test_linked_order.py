from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from mpicomm.cluster.linked_order import Edges, best_order, cost_of
from mpicomm.devices.base import Link

LINKS = (
    Link("self"),
    Link("NVLink", 0, True, True, 200.0),
    Link("NVLink", 0, True, True),
    Link("NVLink", 1, True, True, 50.0),
    Link("PCIe", 0, True, False, 25.0),
    Link("PCIe", 1, True, False, 25.0),
    Link("staged", gb_s=2.0),
)


def test_a_slower_link_costs_more() -> None:
    costs = [cost_of(link) for link in LINKS]
    assert costs == sorted(costs)
    assert cost_of(Link("same device")) == cost_of(Link("self")) == 0
    assert cost_of(Link("unknown")) > cost_of(Link("PCIe"))


def groups(*groups_of: Sequence[int], far: float = 10.0) -> list[list[float]]:
    """Costs of ranks that are linked well within groups."""
    of = {rank: number for number, group in enumerate(groups_of) for rank in group}
    return [[float(a != b) if of[a] == of[b] else far for b in sorted(of)] for a in sorted(of)]


def ring(size: int) -> Edges:
    return {(rank, (rank + 1) % size): 1.0 for rank in range(size)}


def total(costs: list[list[float]], order: Sequence[int], edges: Edges) -> float:
    return sum(weight * (costs[order[a]][order[b]] + costs[order[b]][order[a]]) for (a, b), weight in edges.items())


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12])
def test_equal_links_leave_the_order(size: int) -> None:
    assert best_order(groups(range(size)), ring(size)) == list(range(size))
    assert best_order(groups(range(size)), {}) == list(range(size))


def test_the_heavy_edge_gets_the_fast_link() -> None:
    costs = groups([0, 2], [1])
    assert best_order(costs, {(0, 1): 5.0, (1, 2): 1.0}) == [0, 2, 1]
    assert best_order(costs, {(0, 1): 1.0, (1, 2): 5.0}) == [1, 0, 2]


def test_ranks_without_a_place_are_the_far_ones() -> None:
    order = best_order(groups([0], [1, 3], [2]), {(0, 1): 1.0})
    assert sorted(order[:2]) == [1, 3] and sorted(order) == [0, 1, 2, 3]


def test_both_directions_of_a_link_count() -> None:
    costs = [[0.0, 1.0, 1.0], [9.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert best_order(costs, {(0, 1): 1.0}) == [0, 2, 1]


def test_no_order_is_better_among_few() -> None:
    rng = np.random.default_rng(0)
    for size in (3, 5):
        costs = rng.integers(1, 9, (size, size)).astype(float).tolist()
        edges = {(int(a), int(b)): float(w) for a, b, w in rng.integers(0, size, (6, 3)) if a != b}
        found = total(costs, best_order(costs, edges), edges)
        assert found == min(total(costs, order, edges) for order in itertools.permutations(range(size)))


def test_many_ranks_gain() -> None:
    size = 16
    costs = groups(range(0, size, 2), range(1, size, 2))
    order = best_order(costs, ring(size))
    assert sorted(order) == list(range(size))
    assert total(costs, order, ring(size)) < total(costs, range(size), ring(size)) / 2
    changed = [list(order) for _ in range(2)]
    for (a, b), each in itertools.product(itertools.combinations(range(size), 2), changed[:1]):
        each[a], each[b] = each[b], each[a]
        assert total(costs, each, ring(size)) >= total(costs, order, ring(size))
        each[a], each[b] = each[b], each[a]


def test_places_that_do_not_exist_count_nothing() -> None:
    assert best_order(groups([0, 2], [1, 3]), {(0, 1): 1.0, (0, 9): 99.0, (-1, 2): 99.0, (3, 3): 9.0}) == [0, 2, 1, 3]
