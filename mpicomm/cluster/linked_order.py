"""Which rank takes which vertex of a graph, so that a good link serves each edge. Pure functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mpicomm.devices.base import Link

Edges = Mapping[tuple[int, int], float]
"""The weight of each edge, which goes from a place to a place. A place is a vertex of the graph."""

_MOST_TRIED = 8
"""Up to so many ranks, `best_order` tries every order: 40320 orders of 8 ranks."""
_EQUAL = 1 + 1e-9
_GB_S = {"NVLink": 100.0, "PCIe": 25.0, "staged": 10.0}
_SLOW_GB_S = 5.0


def cost_of(link: Link) -> float:
    """Return the time of a link for a byte, in any unit. If its bandwidth is unknown, the kind of link decides."""
    if link.path in ("self", "same device"):
        return 0.0
    # CUDA's performance rank tells apart links of equal bandwidth, such as links within and between PCIe switches.
    return (1 + (link.performance_rank or 0) / 8) / (link.gb_s or _GB_S.get(link.path, _SLOW_GB_S))


def best_order(costs: Sequence[Sequence[float]], edges: Edges) -> list[int]:
    """Return the rank that takes each place, so that the costs of all edges have a small sum.

    ``costs[a][b]`` is the cost between ranks a and b. There are as many ranks as places. Up to 8 ranks, no order has a
    smaller sum. With more ranks, no exchange of two ranks makes the sum smaller. If no order is better than the order
    of the ranks, the result is the order of the ranks. Edges to places that do not exist count nothing.
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
        # The present order comes first, so it stays if no change makes it better.
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
