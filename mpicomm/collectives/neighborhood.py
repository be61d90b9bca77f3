"""Neighborhood: the neighbours of one rank in a topology, and which blocks of two neighbours match."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError


@dataclass(frozen=True)
class Neighborhood:
    """The ranks that send to this rank and the ranks to which it sends, in the order of the blocks in its buffers.

    A rank may occur several times. ``MPI.PROC_NULL`` stands for a neighbour beyond the edge of a grid. Its block is in
    the buffer, but no rank reads or writes the block.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    crossed: bool = False
    """Whether data that leaves a rank of a grid in one direction of a dimension arrives from the other direction. A
    grid has two blocks for each dimension. If false, the blocks between two ranks match in the order of the buffers."""

    @property
    def names_ranks_once(self) -> bool:
        """Whether no rank occurs several times among the sources, and none among the destinations."""
        named = [[rank for rank in ranks if rank != MPI.PROC_NULL] for ranks in (self.sources, self.destinations)]
        return all(len(set(ranks)) == len(ranks) for ranks in named)

    def outgoing(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of the blocks for each of ``size`` ranks, in the order of sending. Local."""
        return _by_rank(self.destinations, range(len(self.destinations)), size)

    def incoming(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of the blocks from each of ``size`` ranks, in the order of sending. Local.

        A number counts the blocks of the receive buffer. In a crossed grid, the sender has this rank in the other
        direction of the same dimension.
        """
        numbers = range(len(self.sources))
        return _by_rank(self.sources, sorted(numbers, key=lambda number: number ^ self.crossed), size)


def neighborhood_of(comm: MPI.Topocomm) -> Neighborhood:
    """Return the neighbours of this rank, in MPI's order. Local.

    Raises `InvalidUsageError` on every rank for an `MPI.GRAPH` in which neighbours do not match. MPI would accept the
    graph, and then wait for ever for a message.
    """
    if isinstance(comm, MPI.Graphcomm):
        require_symmetric(*comm.Get_topo())
    sources, destinations = comm.inoutedges
    ranks = [rank for rank in sources if rank != MPI.PROC_NULL]
    # If each rank occurs once, there is nothing to cross, and this rank need not ask MPI.
    repeated = len(set(ranks)) < len(ranks)
    crossed = repeated and comm.Get_topology() == MPI.CART and _mpi_crosses()
    return Neighborhood(tuple(sources), tuple(destinations), crossed)


def require_symmetric(index: Sequence[int], edges: Sequence[int]) -> None:
    """Raise unless, for each two ranks, both name each other equally often as a neighbour. Local."""
    spans = enumerate(itertools.pairwise((0, *index)))
    counts = Counter((rank, peer) for rank, (start, end) in spans for peer in edges[start:end])
    for (rank, peer), count in counts.items():
        if counts[peer, rank] != count:
            raise InvalidUsageError(
                f"the graph names rank {peer} {count} times as a neighbour of rank {rank}, and rank {rank} "
                f"{counts[peer, rank]} times as a neighbour of rank {peer}: name both equally often, or say who "
                "sends to whom with Create_dist_graph_adjacent"
            )


def _by_rank(peers: Sequence[int], numbers: Sequence[int], size: int) -> list[tuple[int, ...]]:
    return [tuple(number for number in numbers if peers[number] == rank) for rank in range(size)]


@cache
def _mpi_crosses() -> bool:
    """Return whether MPI crosses the blocks of a grid, as MPI 4 defines; some MPIs match them in plain order. Local."""
    grid = MPI.Intracomm(MPI.COMM_SELF).Create_cart([1], [True])
    received = np.zeros(2, np.int32)
    grid.Neighbor_alltoall(np.arange(2, dtype=np.int32), received)
    grid.Free()
    return int(received[0]) == 1
