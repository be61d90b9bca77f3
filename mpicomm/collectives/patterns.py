"""Patterns: each of MPI's collectives as exchanges between ranks, seen from one rank. Pure functions.

Every pattern takes the `Buffers` of one rank. All ranks get the same number of exchanges. In an exchange, the bytes
that rank a sends to rank b are the bytes that rank b receives from rank a. A count of 0 means no data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import Chain, ChainHop, Exchange, Reduction, TwoShot
from mpicomm.mpi.arguments import Span

_ALIGNED_NBYTES = 128  # a shard begins at a whole cache line of the array, if the array has that many lines

Spans = Sequence[Span]


@dataclass(frozen=True)
class Buffers:
    """The memory of one rank in one collective call.

    Input and output are a block for each rank, or one block if all ranks get the same data. They have no block if MPI
    ignores the buffer on this rank. In a collective in place that only moves data, one of them has no block, too: the
    other one holds the data.
    """

    rank: int
    """This rank's index in the node."""
    size: int
    dtype: np.dtype[Any]
    sends: Spans = ()
    """The input."""
    receives: Spans = ()
    """The output."""
    op: str = ""
    root: int = 0
    block_hashes: tuple[tuple[int, int], ...] = ()
    """See `Exchange.block_hashes`."""
    scratch: int = 0
    """The address of memory for this rank's result of a reduce-scatter in place: see `reduce_scatter`."""

    @property
    def longest(self) -> int:
        """The most elements of a block."""
        return max((span.count for span in (*self.sends, *self.receives)), default=0)

    def part(self, start: int, stop: int) -> Buffers:
        """Return the call on the elements from ``start`` to ``stop`` of each block."""

        def cut(blocks: Spans) -> Spans:
            return [_part(span, min(start, span.count), min(stop, span.count), self.dtype.itemsize) for span in blocks]

        return replace(self, sends=cut(self.sends), receives=cut(self.receives))

    def pieces(self, nbytes: int) -> list[Buffers]:
        """Cut the call into calls on parts of each block of at most ``nbytes`` bytes, equally many on all ranks."""
        step = max(1, nbytes // self.dtype.itemsize)
        return [self.part(start, start + step) for start in range(0, self.longest, step)] or [self]


OneShot = Callable[[Buffers], Exchange]


def blocks(pointer: int, counts: Sequence[int], displs: Sequence[int], itemsize: int) -> list[Span]:
    """Return the blocks of a buffer that begin ``displs[r]`` elements after its start."""
    return [Span(pointer + displ * itemsize, count) for count, displ in zip(counts, displs, strict=True)]


def split(span: Span, size: int, itemsize: int) -> list[Span]:
    """Return ``size`` shards of a span, in order. All shards except the last ones are equal. Pure function."""
    step = shard_count(span.count, size, itemsize)
    bounds = [min(span.count, index * step) for index in range(size + 1)]
    return [_part(span, start, stop, itemsize) for start, stop in itertools.pairwise(bounds)]


def shard_count(count: int, size: int, itemsize: int, whole: int = 0) -> int:
    """Return the elements of each shard except the last ones, if ``count`` elements have ``size`` shards.

    With ``whole`` it is a multiple of so many elements.
    """
    step = -(-count // size)
    if whole:
        return -(-step // whole) * whole
    line = max(1, _ALIGNED_NBYTES // itemsize)
    return step if step <= line else -(-step // line) * line


# One shot: every rank sends its data straight to every rank that needs it.


def allreduce(b: Buffers) -> Exchange:
    """Every rank's output is the reduction of all ranks' input."""
    send = b.sends[0]
    return Exchange(b.dtype, (send,) * b.size, _nowhere(b), Reduction(b.op, tuple(range(b.size)), send, b.receives[0]))


def reduce(b: Buffers) -> Exchange:
    """The root's output is the reduction of all ranks' input."""
    send = b.sends[0]
    if b.rank == b.root:
        reduction = Reduction(b.op, tuple(range(b.size)), send, b.receives[0])
        return Exchange(b.dtype, _nowhere(b), _nowhere(b), reduction)
    return Exchange(b.dtype, _only(b.root, send, b), _nowhere(b))


def reduce_scatter(b: Buffers) -> Exchange:
    """Rank r's output is the reduction of all ranks' block r.

    In place, MPI puts the result at the start of block 0 and leaves the rest of the buffer unchanged. Block 0 holds
    input for another rank. With ``scratch`` this rank reduces into scratch memory of the output's size, and then moves
    the result. Other ranks take no part in the move, because a rank that receives nothing need not be in place. A call
    needs no scratch memory if blocks are equal and the engine sends each part before it overwrites that part of block
    0.
    """
    output = b.receives[0]
    if not b.scratch:
        return _reduce_blocks(b, b.sends, output)
    result = Span(b.scratch, output.count)
    return replace(_reduce_blocks(b, b.sends, result), move=(result, output))


def scan(b: Buffers) -> Exchange:
    """Rank r's output is the reduction of the input of the ranks up to r."""
    send = b.sends[0]
    to_later = tuple(send if peer > b.rank else None for peer in range(b.size))
    reduction = Reduction(b.op, tuple(range(b.rank + 1)), send, b.receives[0])
    return Exchange(b.dtype, to_later, _nowhere(b), reduction)


def exscan(b: Buffers) -> Exchange:
    """Rank r's output is the reduction of the input of the ranks before r; rank 0 writes nothing."""
    reduction = Reduction(b.op, tuple(range(b.rank)), None, b.receives[0]) if b.rank else None
    return replace(scan(b), reduction=reduction)


def allgather(b: Buffers) -> Exchange:
    """Every rank's block r is rank r's input; blocks may have any counts and displacements, as in Allgatherv."""
    mine = b.receives[b.rank]
    return Exchange(b.dtype, (b.sends[0] if b.sends else mine,) * b.size, tuple(b.receives), targets=(mine,) * b.size)


def gather(b: Buffers) -> Exchange:
    """The root's block r is rank r's input; blocks may have any counts and displacements, as in Gatherv."""
    received = tuple(b.receives) if b.rank == b.root else _nowhere(b)
    return Exchange(b.dtype, _only(b.root, b.sends[0] if b.sends else b.receives[b.rank], b), received)


def scatter(b: Buffers) -> Exchange:
    """Rank r's output is the root's block r; blocks may have any counts and displacements, as in Scatterv."""
    sends = tuple(b.sends) if b.rank == b.root else _nowhere(b)
    return Exchange(b.dtype, sends, _only(b.root, b.receives[0] if b.receives else b.sends[b.rank], b))


def alltoall(b: Buffers) -> Exchange:
    """Block r of rank s's output is block s of rank r's input; any counts and displacements, as in Alltoallv."""
    sends, targets = tuple(b.sends or b.receives), (b.receives[b.rank],) * b.size
    return Exchange(b.dtype, sends, tuple(b.receives), targets=targets, block_hashes=b.block_hashes)


def bcast(b: Buffers) -> Exchange:
    """Every rank's output is a copy of the root's. The root sends all of it to every rank."""
    buffer = b.receives[0]
    sends = tuple(buffer if b.rank == b.root != peer else None for peer in range(b.size))
    received = None if b.rank == b.root else buffer
    return Exchange(b.dtype, sends, _only(b.root, received, b), targets=(buffer,) * b.size)


# Two shots: each rank reduces or receives a shard, and sends the shard on.


def two_shot_allreduce(b: Buffers) -> TwoShot:
    """As `allreduce`: each rank reduces a shard, then sends its result to all. It returns the same bits."""
    shards, results = _shards(b, b.sends[0]), _shards(b, b.receives[0])
    gathered = allgather(replace(b, sends=(), receives=results))
    return _reduce_blocks(b, shards, results[b.rank]), gathered


def two_shot_bcast(b: Buffers) -> TwoShot:
    """As `bcast`: the root sends each other rank a shard, which that rank sends on. The root sends its data once."""
    rank, root, everybody = b.rank, b.root, range(b.size)
    shards = _split_without(b, b.receives[0])
    sends = tuple(shards) if rank == root else _nowhere(b)
    own = None if rank == root else shards[rank]
    first = Exchange(b.dtype, sends, _only(root, own, b), targets=tuple(shards))
    others = tuple(own if peer not in (rank, root) else None for peer in everybody)
    received = tuple(shards[peer] if rank not in (peer, root) and peer != root else None for peer in everybody)
    return first, Exchange(b.dtype, others, received, targets=(shards[rank],) * b.size)


def two_shot_reduce(b: Buffers) -> TwoShot:
    """As `reduce`: each rank except the root reduces a shard and sends it to the root.

    The root receives its result once. The pattern is for engines that send a result on without storing it: on all ranks
    except the root the result has address 0.
    """
    shards = _split_without(b, b.sends[0])
    if b.rank == b.root:
        results = _split_without(b, b.receives[0])
        return Exchange(b.dtype, tuple(shards), _nowhere(b)), Exchange(b.dtype, _nowhere(b), tuple(results))
    result = Span(0, shards[b.rank].count)
    return _reduce_blocks(b, shards, result), Exchange(b.dtype, _only(b.root, result, b), _nowhere(b))


# Ring and chain: each rank sends only to the next rank.


def ring_allreduce(b: Buffers) -> list[Exchange]:
    """Every rank's output is the reduction of all ranks' input; a rank sends only to the next rank.

    A reduce-scatter leaves the result of shard r on rank r. Then follows an all-gather. Each has ``size - 1``
    exchanges: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69
    (2009).

    The ring fixes the order of reduction: shard r is reduced over the ranks r + 1, r + 2, ..., and rank r comes last.
    Partial results travel as ``dtype``, so types of 16 bits or fewer are rounded at every step.
    """
    rank, size = b.rank, b.size
    if size == 1:
        return [allreduce(b)]
    following, previous = (rank + 1) % size, (rank - 1) % size
    shards, results = _shards(b, b.sends[0]), _shards(b, b.receives[0])
    steps = []
    partial = shards[previous]
    for step in range(1, size):
        index = (previous - step) % size
        reduction = Reduction(b.op, (previous, rank), shards[index], results[index])
        steps.append(Exchange(b.dtype, _only(following, partial, b), _nowhere(b), reduction))
        partial = results[index]
    for step in range(size - 1):
        passed_on, taken = results[(rank - step) % size], results[(previous - step) % size]
        steps.append(Exchange(b.dtype, _only(following, passed_on, b), _only(previous, taken, b)))
    return steps


def ring_refusal(op: str) -> str | None:
    """Return the reason, for an error, why the ring cannot reduce with an operation; None if it can."""
    if op == "avg":
        return "the ring cannot average on the way: sum, and divide by the number of ranks"
    if op == "tree":
        return 'the ring is no tree, and order="tree" wants one'
    return None


def chain_bcast(b: Buffers) -> Chain:
    """As `bcast`: from the root on, each rank sends the data that it receives to the next rank."""
    buffer, link = b.receives[0], (b.rank - b.root) % b.size
    own, output = (buffer, None) if link == 0 else (None, buffer)
    hop = ChainHop(own, output, receives=link > 0, sends=link < b.size - 1)
    return Chain(b.dtype, (hop,), links=b.size - 1)


def chain_reduce(b: Buffers) -> Chain:
    """As `reduce`: each rank sends the reduction of all ranks up to itself to the next rank.

    The reduction keeps the order of ranks, so it ends on the last rank. The root is the last rank, or the first rank,
    which gets the result from the last rank. Partial results travel as ``dtype``.
    """
    send, last = b.sends[0], b.size - 1
    returns = b.root == 0 and last > 0
    output = b.receives[0] if b.rank == b.root == last else None
    hops = [ChainHop(send, output, receives=b.rank > 0, sends=b.rank < last or returns)]
    if returns and b.rank == 0:
        hops.append(ChainHop(None, b.receives[0], receives=True, sends=False))
    return Chain(b.dtype, tuple(hops), links=last + returns)


def _shards(b: Buffers, span: Span) -> list[Span]:
    return split(span, b.size, b.dtype.itemsize)


def _split_without(b: Buffers, span: Span) -> list[Span]:
    """Split a span among all ranks except the root. The root's shard is empty."""
    shards = split(span, b.size - 1, b.dtype.itemsize) if b.size > 1 else []  # one rank has no peers
    return [*shards[: b.root], Span(span.pointer, 0), *shards[b.root :]]


def _reduce_blocks(b: Buffers, blocks: Spans, output: Span) -> Exchange:
    sends = tuple(None if peer == b.rank else block for peer, block in enumerate(blocks))
    return Exchange(b.dtype, sends, _nowhere(b), Reduction(b.op, tuple(range(b.size)), blocks[b.rank], output))


def _only(peer: int, span: Span | None, b: Buffers) -> tuple[Span | None, ...]:
    return tuple(span if index == peer else None for index in range(b.size))


def _nowhere(b: Buffers) -> tuple[None, ...]:
    return (None,) * b.size


def _part(span: Span, start: int, stop: int, itemsize: int) -> Span:
    return Span(span.pointer + start * itemsize, stop - start)
