"""Which rank takes which place of a graph, so that ranks at the ends of an edge are linked well. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mpicomm.devices.base import Link

Edges = Mapping[tuple[int, int], float]
"""The weight of each edge, which goes from a place to a place."""

_MOST_TRIED = 8
"""Ranks of which every order is tried: 40320 orders of 8."""
_EQUAL = 1 + 1e-9
_GB_S = {"NVLink": 100.0, "PCIe": 25.0, "staged": 10.0}
_SLOW_GB_S = 5.0


def cost_of(link: Link) -> float:
    """Return how long a link takes for a byte, in no particular unit; by its kind where its bandwidth is unknown."""
    if link.path in ("self", "same device"):
        return 0.0
    # CUDA's rank tells links of one bandwidth apart, such as those within a PCIe switch and those between switches.
    return (1 + (link.performance_rank or 0) / 8) / (link.gb_s or _GB_S.get(link.path, _SLOW_GB_S))


def best_order(costs: Sequence[Sequence[float]], edges: Edges) -> list[int]:
    """Return the rank that takes each place, so that the costs of all edges have a small sum.

    ``costs[a][b]`` is the cost between ranks a and b, of which there are as many as places. Up to 8 ranks no order has
    a smaller sum. Between more ranks, no two of them can change places with a gain. The order is that of the ranks
    where no other is better. Edges to places that do not exist count nothing.
    """
    size = len(costs)
    one_way = np.array(costs, float).reshape(size, size)
    between = one_way + one_way.T
    places = range(size)
    counted = [(a, b, weight) for (a, b), weight in edges.items() if a in places and b in places and a != b]

    def sums(orders: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        total = np.zeros(len(orders))
        for a, b, weight in counted:
            total += weight * between[orders[:, a], orders[:, b]]
        return total

    if size <= _MOST_TRIED:
        return _first_of_the_best(np.array(list(itertools.permutations(places))), sums)
    order = list(places)
    while True:
        # The order itself comes first, so that it stays where no change gains anything.
        better = _first_of_the_best(np.array([order, *_swapped(order)]), sums)
        if better == order:
            return order
        order = better


def _first_of_the_best(
    orders: npt.NDArray[np.int64], sums: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.float64]]
) -> list[int]:
    total = sums(orders)
    found: list[int] = orders[np.flatnonzero(total <= total.min() * _EQUAL)[0]].tolist()
    return found


def _swapped(order: list[int]) -> Iterator[list[int]]:
    for a, b in itertools.combinations(range(len(order)), 2):
        changed = list(order)
        changed[a], changed[b] = order[b], order[a]
        yield changed
