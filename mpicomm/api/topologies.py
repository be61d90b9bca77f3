"""Communicators with a topology: checks of their arguments, and ``reorder=True``, which gives neighbours fast links.

If the arguments are wrong, MPI ends the program, reads other memory or waits for ever. So the ranks exchange what they
pass, and raise the same `InvalidUsageError`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
from mpi4py import MPI

from mpicomm.api.splits import integers
from mpicomm.devices.base import Link
from mpicomm.errors import InvalidUsageError
from mpicomm.session import Session

T = TypeVar("T")
Weights = list[int] | None
Neighbors = tuple[list[int], list[int], Weights, Weights]
"""The sources and destinations of one rank of a graph, and the weights of both."""
Edges = Mapping[tuple[int, int], float]
"""The weight of each edge, by the two vertices. A vertex is the number of a rank in the new communicator."""
_TAKES_NULL = "Open MPI" not in MPI.Get_library_version()
"""Whether MPI takes MPI.PROC_NULL for a neighbour. Open MPI 5.0.11 ends the program in a collective of neighbours."""

_MOST_EXHAUSTIVE = 8
"""Up to so many ranks, `best_order` tries every order: 40320 orders of 8 ranks."""
_TOLERANCE = 1 + 1e-9
_GB_S = {"NVLink": 100.0, "PCIe": 25.0, "staged": 10.0}
_UNKNOWN_GB_S = 5.0


@contextmanager
def reordered(
    parent: MPI.Intracomm, session: Session, what: str, reorder: bool, edges: Callable[[], Edges]
) -> Iterator[tuple[Any, bool]]:
    """Yield a communicator of the same ranks in the order of fast links, and ``reorder`` for MPI's call. Collective.

    ``what`` is the call. ``edges`` returns the edges of the topology, the same on all ranks. MPI decides on the order
    if `costs_between` returns None.
    """
    comm = MPI.Intracomm(parent)
    costs = costs_between(comm, session, what) if reorder else None
    order = None if costs is None else best_order(costs, edges())
    if order is None or order == sorted(order):
        yield comm, reorder and order is None
        return
    ordered = comm.Split(0, order.index(comm.rank))
    try:
        yield ordered, False
    finally:
        ordered.Free()


def costs_between(comm: MPI.Intracomm, session: Session, what: str) -> list[list[float]] | None:
    """Return the costs from each rank to each rank, or None if the links are not known. Collective, blocking.

    It also returns None if ranks share a GPU. There another order gains nothing, and some programs pass reorder=True
    but rely on the old order.
    """
    placement = session.placement
    if len(placement.nodes) > 1 or not isinstance(placement.here.device, int) or placement.max_ranks_per_device > 1:
        return None
    return comm.allgather([cost_of(link) for link in session.set_up(what).links()])


def cost_of(link: Link) -> float:
    """Return the time of a link for a byte, in any unit. If its bandwidth is unknown, the kind of link decides."""
    if link.path in ("self", "same device"):
        return 0.0
    # CUDA's performance rank tells apart links of equal bandwidth, such as links within and between PCIe switches.
    return (1 + (link.performance_rank or 0) / 8) / (link.gb_s or _GB_S.get(link.path, _UNKNOWN_GB_S))


def best_order(costs: Sequence[Sequence[float]], edges: Edges) -> list[int]:
    """Return the rank of each vertex, so that the costs of all edges have a small sum.

    ``costs[a][b]`` is the cost between ranks a and b. There are as many ranks as vertices. Up to 8 ranks no order has
    a smaller sum. With more ranks no swap of two ranks makes the sum smaller. The order of the ranks stays if no other
    order is better. Edges to vertices that do not exist are ignored.
    """
    size = len(costs)
    one_way = np.array(costs, float).reshape(size, size)
    between = one_way + one_way.T
    vertices = range(size)
    inner = [(a, b, weight) for (a, b), weight in edges.items() if a in vertices and b in vertices and a != b]

    def first_of_the_best(orders: Iterable[Sequence[int]]) -> list[int]:
        tried = np.array(list(orders))
        sums = np.zeros(len(tried))
        for a, b, weight in inner:
            sums += weight * between[tried[:, a], tried[:, b]]
        best: list[int] = tried[np.flatnonzero(sums <= sums.min() * _TOLERANCE)[0]].tolist()
        return best

    if size <= _MOST_EXHAUSTIVE:
        return first_of_the_best(itertools.permutations(vertices))
    order = list(vertices)
    # The present order comes first, so it stays if no change makes it better.
    while (better := first_of_the_best([order, *_swapped(order)])) != order:
        order = better
    return order


def _swapped(order: list[int]) -> Iterator[list[int]]:
    for a, b in itertools.combinations(range(len(order)), 2):
        changed = list(order)
        changed[a], changed[b] = order[b], order[a]
        yield changed


def edges_of_grid(dims: Sequence[int], periods: Sequence[bool] | bool | None, size: int) -> Edges:
    """Return the edges between neighbours of a grid. A grid that MPI will refuse has none."""
    periodic = [bool(periods)] * len(dims) if periods is None or isinstance(periods, (bool, int)) else periods
    if min(dims, default=1) < 1 or math.prod(dims) > size or len(periodic) != len(dims):
        return {}
    edges: Counter[tuple[int, int]] = Counter()
    for here, axis in itertools.product(itertools.product(*map(range, dims)), range(len(dims))):
        after = [*here]
        after[axis] = (here[axis] + 1) % dims[axis]
        if after[axis] or periodic[axis]:
            edges[int(np.ravel_multi_index(here, dims)), int(np.ravel_multi_index(after, dims))] += 1
    return edges


def read_graph(comm: MPI.Intracomm, index: Any, edges: Any) -> Edges:
    """Return the edges of a graph that all ranks pass. Collective. Rank r has the neighbours up to ``edges[index[r]]``.

    mpi4py also takes an index with a leading 0, which stands for no rank.
    """

    def read() -> tuple[list[int], list[int]]:
        ends, peers = _integers("index", index), _integers("edges", edges)
        starts = ends if len(ends) and ends[0] == 0 and ends[-1] == len(peers) else [0, *ends]
        nodes = len(starts) - 1
        if nodes > comm.size:
            raise InvalidUsageError(f"index has {nodes} ranks, but the communicator has {comm.size}: pass up to these")
        for start, end in itertools.pairwise(starts):
            if end < start:
                raise InvalidUsageError(
                    f"index={ends!r} goes down to {end}: pass the sums of the numbers of neighbours"
                )
        if starts[-1] > len(peers):
            raise InvalidUsageError(f"edges has {len(peers)} items, but index says {starts[-1]}: pass all of them")
        return starts, _ranks("edges", peers, nodes)

    starts, peers = allgather(comm, "Create_graph", read)[comm.rank]
    spans = enumerate(itertools.pairwise(starts))
    return Counter((rank, peer) for rank, (start, stop) in spans for peer in peers[start:stop])


def read_edges(comm: MPI.Intracomm, sources: Any, degrees: Any, destinations: Any, weights: Any) -> Edges:
    """Return the edges of a graph, of which each rank passes any. Collective."""

    def read() -> tuple[list[int], list[int], Weights]:
        starts = _ranks("sources", sources, comm.size)
        counts = _integers("degrees", degrees, len(starts))
        if min(counts, default=0) < 0:
            raise InvalidUsageError(f"degrees={counts!r} has a negative number: pass 0 or more")
        ends = _ranks("destinations", destinations, comm.size, sum(counts))
        froms = [source for source, degree in zip(starts, counts, strict=True) for _ in range(degree)]
        return froms, ends, _weights("weights", weights, len(ends))

    edges: Counter[tuple[int, int]] = Counter()
    for froms, ends, edge_weights in allgather(comm, "Create_dist_graph", read):
        for source, end, weight in zip(froms, ends, edge_weights or itertools.repeat(1)):  # noqa: B905
            edges[source, end] += weight
    return edges


def read_neighbors(
    comm: MPI.Intracomm, sources: Any, destinations: Any, sourceweights: Any, destweights: Any
) -> list[Neighbors]:
    """Return the neighbours of all ranks. Collective. Raises if two ranks do not name each other equally often."""
    what, size = "Create_dist_graph_adjacent", comm.size

    def read() -> Neighbors:
        froms = _ranks("sources", () if sources is None else sources, size, or_null=True)
        from_weights = _weights("sourceweights", sourceweights, len(froms))
        ends = _ranks("destinations", () if destinations is None else destinations, size, or_null=True)
        return froms, ends, from_weights, _weights("destweights", destweights, len(ends))

    neighbors = allgather(comm, what, read)
    sends = Counter((rank, peer) for rank, (_, ends, *_) in enumerate(neighbors) for peer in ends)
    for rank, (froms, *_) in enumerate(neighbors):
        receives = Counter(froms)
        for peer in range(size):
            if sends[peer, rank] != receives[peer]:
                raise InvalidUsageError(
                    f"{what}: rank {rank}: rank {peer} names rank {rank} {sends[peer, rank]} times as a destination, "
                    f"and this rank names rank {peer} {receives[peer]} times as a source: let both ranks name each "
                    "other equally often",
                    ranks=[rank],
                )
    return neighbors


def edges_of(neighbors: Sequence[Neighbors]) -> Edges:
    """Return the edges of a graph, from the neighbours of all ranks."""
    edges: Counter[tuple[int, int]] = Counter()
    for rank, (_, destinations, _, weights) in enumerate(neighbors):
        for peer, weight in zip(destinations, weights or itertools.repeat(1)):  # noqa: B905
            edges[rank, peer] += weight
    return edges


def allgather(comm: MPI.Intracomm, what: str, read: Callable[[], T]) -> list[T]:
    """Return what ``read`` returns on each rank. Raise its error on all ranks if it raises on one. Collective."""
    fault, result = "", None
    try:
        result = read()
    except (InvalidUsageError, TypeError, BufferError) as error:
        fault = str(error).removeprefix(f"{what}: ")
    results = comm.allgather((fault, result))
    for rank, (fault, _) in enumerate(results):
        if fault:
            raise InvalidUsageError(f"{what}: rank {rank}: {fault}", ranks=[rank])
    return [result for _, result in results]


def _integers(name: str, values: Any, count: int | None = None) -> list[int]:
    items = list(integers(name, values))
    if count is not None and len(items) != count:
        raise InvalidUsageError(f"{name} has {len(items)} items: pass {count}")
    return items


def _ranks(name: str, values: Any, size: int, count: int | None = None, *, or_null: bool = False) -> list[int]:
    ranks = _integers(name, values, count)
    for index, rank in enumerate(ranks):
        if or_null and rank == MPI.PROC_NULL and not _TAKES_NULL:
            raise InvalidUsageError(
                f"{name}[{index}] is MPI.PROC_NULL, with which Open MPI ends the program in collectives of neighbours: "
                "leave it out"
            )
        if not (0 <= rank < size or (or_null and rank == MPI.PROC_NULL)):
            way_out = f"use 0 to {size - 1}" + (" or MPI.PROC_NULL" if or_null else "")
            raise InvalidUsageError(f"{name}[{index}]={rank} is no rank of the communicator: {way_out}")
    return ranks


def _weights(name: str, weights: Any, count: int) -> Weights:
    """Return weights without MPI's constants, because their values differ between processes."""
    if weights is None or (isinstance(weights, int) and weights == MPI.UNWEIGHTED):
        return None
    return _integers(name, [] if isinstance(weights, int) else list(weights), count)
