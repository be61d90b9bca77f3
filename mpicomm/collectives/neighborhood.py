"""Neighborhood: the neighbours of one rank in a topology, and which blocks of two neighbours match.

`blocks_for_ranks` makes a collective of neighbours an all-to-all among all ranks, in which most pairs have no data.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.collectives.operations import NEIGHBOR_ALLTOALL, NEIGHBOR_ALLTOALLV, Operation
from mpicomm.collectives.packed import blocks_of
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Operand, Span
from mpicomm.mpi.layout import Elements, byte_run, concat
from mpicomm.mpi.spec import typed_blocks


@dataclass(frozen=True)
class Neighborhood:
    """The ranks that send to this rank and the ranks to which it sends, in the order of the blocks in its buffers.

    A rank may occur several times. ``MPI.PROC_NULL`` stands for a neighbour beyond the edge of a grid. Its block is in
    the buffer, but no rank reads or writes the block.
    """

    sources: tuple[int, ...]
    destinations: tuple[int, ...]
    crossed: bool = False
    """Whether a rank occurs several times in a grid, which has two blocks for each dimension. MPI defines that data
    sent in one direction of a dimension arrives from the other one. If false, the blocks between two ranks match in
    the order of the buffers."""

    @property
    def names_ranks_once(self) -> bool:
        """Whether no rank occurs several times among the sources, and none among the destinations."""
        sides = [[rank for rank in ranks if rank != MPI.PROC_NULL] for ranks in (self.sources, self.destinations)]
        return all(len(set(ranks)) == len(ranks) for ranks in sides)

    def outgoing(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of the blocks for each of ``size`` ranks, in the order of sending. Local."""
        destinations = self.destinations
        return [tuple(n for n in range(len(destinations)) if destinations[n] == rank) for rank in range(size)]

    def incoming(self, size: int) -> list[tuple[int, ...]]:
        """Return the numbers of the blocks of the receive buffer from each of ``size`` ranks, in the order of sending.

        Local. In a crossed grid, the sender has this rank in the other direction of the same dimension.
        """
        numbers = sorted(range(len(self.sources)), key=lambda number: number ^ self.crossed)
        return [tuple(n for n in numbers if self.sources[n] == rank) for rank in range(size)]


def neighborhood_of(comm: MPI.Topocomm) -> Neighborhood:
    """Return the neighbours of this rank, in MPI's order. Local.

    Raises `InvalidUsageError` on every rank for an `MPI.GRAPH` in which neighbours do not match. MPI would accept the
    graph, and then wait for ever for a message.
    """
    if isinstance(comm, MPI.Graphcomm):
        require_symmetric(*comm.Get_topo())
    sources, destinations = comm.inoutedges
    neighborhood = Neighborhood(tuple(sources), tuple(destinations))
    return replace(neighborhood, crossed=comm.Get_topology() == MPI.CART and not neighborhood.names_ranks_once)


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


@cache
def mpi_crosses(mode: int) -> bool:
    """Return whether MPI crosses the blocks of a grid in calls of a mode, an index of `Operation.methods`. Local.

    The nonblocking and persistent calls of Open MPI 5 match the blocks between two ranks in the order of the buffers.
    """
    grid, received = MPI.Intracomm(MPI.COMM_SELF).Create_cart([1], [True]), np.zeros(2, np.int32)
    request = getattr(grid, NEIGHBOR_ALLTOALL.methods[mode])(np.arange(2, dtype=np.int32), received)
    if isinstance(request, MPI.Prequest):
        request.Start()
    if request is not None:
        request.Wait()
        request.free()
    grid.Free()
    return int(received[0]) == 1


def crossed_by_displacements(
    operation: Operation, send: Operand, receive: Operand, sources: Sequence[int]
) -> tuple[Operation, Any, Any]:
    """Return an all-to-all on host arrays that crosses the blocks of a grid with an MPI that does not. Local.

    MPI gets the two receive blocks of a dimension swapped, in a call that has a displacement for each block.
    """
    order = [number ^ (sources[number] == sources[number ^ 1]) for number in range(len(sources))]
    if operation.send == "typed":
        blocks = typed_blocks(receive.spec, size=len(order), name=receive.name, peer="neighbour")
        return operation, send.spec, [receive.spec[0], *([each[number] for number in order] for each in blocks)]
    return NEIGHBOR_ALLTOALLV, _with_displacements(send, range(len(order))), _with_displacements(receive, order)


def _with_displacements(operand: Operand, order: Sequence[int]) -> Any:
    """Return an argument of Neighbor_alltoallv with the blocks of ``operand`` in ``order``."""
    datatype, unit = operand.mpi_type, 1
    if operand.dtype is not None:
        datatype = types.mpi_datatype(operand.dtype)
        if datatype is None:
            datatype, unit = MPI.BYTE, operand.dtype.itemsize
    elif datatype is None:
        return operand.spec  # mpi4py refuses elements of unknown type
    counts, displs = operand.counts, operand.displs
    if counts is None or displs is None:
        counts, displs = (operand.count,) * len(order), tuple(operand.count * number for number in range(len(order)))
    memory = MPI.memory.fromaddress(operand.pointer, operand.nbytes)
    return [memory, [unit * counts[number] for number in order], [unit * displs[number] for number in order], datatype]


def blocks_for_ranks(
    operation: Operation, send: Operand, receive: Operand, neighborhood: Neighborhood, rank: int, size: int
) -> tuple[list[Elements], list[Elements], tuple[tuple[int, int], ...]]:
    """Return the block to each rank, the block from each rank, and the `Exchange.block_hashes` of both.

    The block of a rank joins all blocks of that neighbour, one after the other. Raises `InvalidUsageError` if this rank
    is its own neighbour, and its blocks to itself differ from its blocks from itself.
    """
    outgoing, incoming = neighborhood.outgoing(size), neighborhood.incoming(size)
    if operation.send == "one":  # all neighbours get the first block
        outgoing = [(0,) * len(numbers) for numbers in outgoing]
    to_ranks = _blocks_of_ranks(send, outgoing, len(neighborhood.destinations))
    from_ranks = _blocks_of_ranks(receive, incoming, len(neighborhood.sources))
    sent, received = ([block.layout.nbytes for block in blocks[rank]] for blocks in (to_ranks, from_ranks))
    if sent != received:
        raise InvalidUsageError(
            f"{operation}: this rank is its own neighbour, and its blocks of {sent} bytes do not fit its blocks of "
            f"{received} bytes: they must be equal"
        )
    hashes = tuple(zip(map(_hash_of_lengths, to_ranks), map(_hash_of_lengths, from_ranks), strict=True))
    return _joined(send.pointer, to_ranks), _joined(receive.pointer, from_ranks), hashes


def _blocks_of_ranks(operand: Operand, numbers: Sequence[Sequence[int]], blocks: int) -> list[list[Elements]]:
    """Return the blocks of each rank, as ``numbers`` lists them."""
    elements = [
        Elements(block.pointer, byte_run(block.count)) if isinstance(block, Span) else block
        for block in blocks_of(operand, blocks)
    ]
    return [[elements[number] for number in of_rank] for of_rank in numbers]


def _joined(base: int, blocks: Sequence[Sequence[Elements]]) -> list[Elements]:
    """Return the blocks of each rank as one block."""
    # Ranks that get the same blocks, as in an all-gather, have one layout, so a kernel packs these blocks once.
    made = {tuple(of_rank): concat((block.address - base, block.layout) for block in of_rank) for of_rank in blocks}
    return [Elements(base, made[tuple(of_rank)]) for of_rank in blocks]


def _hash_of_lengths(blocks: Sequence[Elements]) -> int:
    """Return a hash of the lengths of blocks; 0 for one block, because ranks compare its bytes anyway."""
    lengths = [block.layout.nbytes for block in blocks]
    return zlib.crc32(struct.pack(f"<{len(lengths)}Q", *lengths)) if len(lengths) > 1 else 0
