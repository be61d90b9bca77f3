"""The option ``reorder=True`` of communicators with a topology: neighbours get GPUs with fast links."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.cluster.linked_order import Edges, best_order, cost_of
from mpicomm.session import Session

Weights = list[int] | None
Lists = tuple[list[int], list[int], Weights, Weights]
"""The sources and destinations of one rank of a graph, and the weights of both."""
Parts = tuple[list[int], list[int], list[int], Weights]
"""The edges that one rank passes: the sources, the number of edges of each source, the destinations, the weights."""


@contextmanager
def linked_well(
    given: MPI.Intracomm, session: Session, what: str, reorder: bool, edges: Callable[[], Edges]
) -> Iterator[tuple[MPI.Intracomm, bool]]:
    """Give MPI's call a communicator of the same ranks, and its argument ``reorder``. Collective, blocking.

    ``what`` is the call. ``edges`` returns the edges of the topology, the same on all ranks. MPI decides on the order
    if `costs_between` returns None.
    """
    comm = MPI.Intracomm(given)
    costs = costs_between(comm, session, what) if reorder else None
    if costs is None:
        yield comm, reorder
        return
    order = best_order(costs, edges())
    if order == sorted(order):
        yield comm, False
        return
    moved = comm.Split(0, order.index(comm.rank))
    assert isinstance(moved, MPI.Intracomm)
    try:
        yield moved, False
    finally:
        moved.Free()


def costs_between(comm: MPI.Intracomm, session: Session, what: str) -> list[list[float]] | None:
    """Return the costs from each rank to each rank, or None if the links are not known. Collective, blocking.

    It also returns None if ranks share a GPU. There another order gains no speed, and some programs ask for another
    order but do not expect to get it.
    """
    placement = session.placement
    if len(placement.nodes) > 1 or not isinstance(placement.here.device, int):
        return None
    if len({place.device_uuid for place in placement.places}) < len(placement.places):
        return None
    return comm.allgather([cost_of(link) for link in session.set_up(what).links()])


def edges_of_grid(dims: Sequence[int], periods: Sequence[bool] | bool | None, size: int) -> Edges:
    """Return the edges between neighbours of a grid. A grid that MPI will refuse has none."""
    periodic = [bool(periods)] * len(dims) if periods is None or isinstance(periods, (bool, int)) else periods
    if min(dims, default=1) < 1 or math.prod(dims) > size or len(periodic) != len(dims):
        return {}
    edges: Counter[tuple[int, int]] = Counter()
    for place, number in itertools.product(itertools.product(*map(range, dims)), range(len(dims))):
        beside = [*place]
        beside[number] = (place[number] + 1) % dims[number]
        if beside[number] or periodic[number]:
            edges[int(np.ravel_multi_index(place, dims)), int(np.ravel_multi_index(beside, dims))] += 1
    return edges


def edges_of_graph(index: Sequence[int], edges: Sequence[int]) -> Edges:
    """Return the edges of a graph. Rank r has the neighbours up to ``edges[index[r]]``."""
    spans = enumerate(itertools.pairwise(starts_of_graph(index, edges)))
    return Counter((rank, peer) for rank, (start, stop) in spans for peer in edges[start:stop])


def starts_of_graph(index: Sequence[int], edges: Sequence[int]) -> list[int]:
    """Return where the neighbours of each rank begin in ``edges``, and where the neighbours of the last rank end.

    mpi4py also takes an index with a leading 0, which stands for no rank.
    """
    return [*index] if len(index) and index[0] == 0 and index[-1] == len(edges) else [0, *index]


def edges_of_lists(lists: Sequence[Lists]) -> Edges:
    """Return the edges of a graph, from the lists of all ranks."""
    found: Counter[tuple[int, int]] = Counter()
    for rank, (_, destinations, _, weights) in enumerate(lists):
        for peer, weight in zip(destinations, _each(weights, destinations), strict=False):
            found[rank, peer] += weight
    return found


def edges_of_parts(parts: Sequence[Parts]) -> Edges:
    """Return the edges of a graph, from the edges that each rank passes."""
    found: Counter[tuple[int, int]] = Counter()
    for sources, degrees, destinations, weights in parts:
        starts = [source for source, degree in zip(sources, degrees, strict=False) for _ in range(degree)]
        for edge, weight in zip(zip(starts, destinations, strict=False), _each(weights, destinations), strict=False):
            found[edge] += weight
    return found


def listed(weights: Any) -> Weights:
    """Return weights without MPI's constants, because their values differ between processes."""
    if weights is None or (isinstance(weights, int) and weights == MPI.UNWEIGHTED):
        return None
    return [] if isinstance(weights, int) else list(weights)


def _each(weights: Weights, edges: list[int]) -> list[int]:
    return [1] * len(edges) if weights is None else weights
