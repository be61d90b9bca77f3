"""Patterns: what each of MPI's collectives is as a list of exchanges, seen from one rank. Pure functions.

All take ``rank`` and ``size`` (of the node), the dtype, then spans of this rank's memory: ``send`` is one span, and
``blocks`` one per rank (see `blocks` and `split`). A span that MPI does not look at on this rank is None. In place is
expressed by equal pointers, as MPI says where: input and output are then the same span, or in the gathering ones the
rank's own block. All ranks get equally many exchanges, in which what one sends to another agrees with what that
receives; counts of 0 are nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from mpicomm.collectives.exchange import Exchange, Reduction
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.span import Span

_ALIGNED_NBYTES = 128  # shards begin at whole cache lines of the array, where it has that many

Dtype = np.dtype[Any]
Spans = Sequence[Span]
T = TypeVar("T")


def blocks(pointer: int, counts: Sequence[int], displs: Sequence[int], itemsize: int) -> list[Span]:
    """Return the blocks of a buffer that begin ``displs[r]`` elements after its start."""
    return [Span(pointer + displ * itemsize, count) for count, displ in zip(counts, displs, strict=True)]


def split(span: Span, size: int, itemsize: int) -> list[Span]:
    """Return ``size`` shards of a span, in order and equal but for the last ones; depends on nothing else."""
    step = -(-span.count // size)
    line = max(1, _ALIGNED_NBYTES // itemsize)
    if step > line:
        step = -(-step // line) * line
    bounds = [min(span.count, index * step) for index in range(size + 1)]
    return [_part(span, start, stop, itemsize) for start, stop in itertools.pairwise(bounds)]


def allreduce(
    rank: int,
    size: int,
    dtype: Dtype,
    send: Span,
    output: Span,
    op: str,
    *,
    piece_nbytes: int | None = None,
) -> list[Exchange]:
    """Every rank's ``output`` is the reduction of all ranks' ``send``.

    One-shot: all send all to all. With ``piece_nbytes`` two-shot: piece after piece, each rank reduces a shard and
    sends the result to all, while it is in the cache. Both return the same, bitwise.
    """
    everybody = tuple(range(size))
    if piece_nbytes is None:
        return [Exchange(dtype, (send,) * size, (None,) * size, Reduction(op, everybody, send, output))]
    steps = []
    for piece, result in zip(_pieces(send, dtype, piece_nbytes), _pieces(output, dtype, piece_nbytes), strict=True):
        shards, results = split(piece, size, dtype.itemsize), split(result, size, dtype.itemsize)
        steps.append(_reduce_blocks(rank, size, dtype, shards, results[rank], op))
        steps += allgather(rank, size, dtype, results[rank], results)
    return steps


def ring_allreduce(rank: int, size: int, dtype: Dtype, send: Span, output: Span, op: str) -> list[Exchange]:
    """Every rank's ``output`` is the reduction of all ranks' ``send``; a rank sends to the next one alone.

    A reduce-scatter, which leaves the result of shard r on rank r, then an all-gather, of ``size - 1`` exchanges each:
    P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 69 (2009).

    The order of reduction is not `allreduce`'s but the ring's own, and as fixed: for shard r ranks r + 1, ... and
    r itself last. Partial results travel as ``dtype``: types of 16 bits or fewer are rounded at every step. None can be
    averaged on the way: ``avg`` raises `InvalidUsageError`.
    """
    if op == "avg":
        raise InvalidUsageError('the ring cannot average: use algorithm="auto", or sum and divide by the ranks')
    if size == 1:
        return allreduce(rank, size, dtype, send, output, op)
    following, previous = (rank + 1) % size, (rank - 1) % size
    nowhere: tuple[None, ...] = (None,) * size
    shards, results = split(send, size, dtype.itemsize), split(output, size, dtype.itemsize)
    steps = []
    partial = shards[previous]
    for step in range(1, size):
        index = (previous - step) % size
        reduction = Reduction(op, (previous, rank), shards[index], results[index])
        steps.append(Exchange(dtype, _only(following, partial, size), nowhere, reduction))
        partial = results[index]
    for step in range(size - 1):
        passed_on, taken = results[(rank - step) % size], results[(previous - step) % size]
        steps.append(Exchange(dtype, _only(following, passed_on, size), _only(previous, taken, size)))
    return steps


def reduce(rank: int, size: int, dtype: Dtype, send: Span, output: Span | None, op: str, root: int) -> list[Exchange]:
    """The root's ``output`` is the reduction of all ranks' ``send``: all send to the root, which reduces."""
    nowhere: tuple[None, ...] = (None,) * size
    if rank == root:
        return [Exchange(dtype, nowhere, nowhere, Reduction(op, tuple(range(size)), send, _needed(output)))]
    return [Exchange(dtype, _only(root, send, size), nowhere)]


def reduce_scatter(
    rank: int,
    size: int,
    dtype: Dtype,
    blocks: Spans,
    output: Span,
    op: str,
    *,
    scratch: Span | None = None,
) -> list[Exchange]:
    """Rank r's ``output`` is the reduction of all ranks' block r; blocks of equal counts make it the block variant.

    In place MPI wants the result at the start of block 0, where other ranks' input is, and the rest left alone: it is
    reduced into ``scratch``, of as many elements as the output has, and moved in a second exchange, in which no other
    rank has a part: those that receive nothing need not be in place. None is needed where blocks are equal and an
    engine sends a part of each of them before it overwrites that part of block 0.
    """
    if scratch is None:
        return [_reduce_blocks(rank, size, dtype, blocks, output, op)]
    result = Span(scratch.pointer, output.count)
    move = Exchange(dtype, _only(rank, result, size), _only(rank, output, size))
    return [_reduce_blocks(rank, size, dtype, blocks, result, op), move]


def allgather(rank: int, size: int, dtype: Dtype, send: Span, blocks: Spans) -> list[Exchange]:
    """Every rank's block r is what rank r sends; blocks of any counts and places make it MPI's Allgatherv."""
    return [Exchange(dtype, (send,) * size, tuple(blocks), lands=(blocks[rank],) * size)]


def gather(rank: int, size: int, dtype: Dtype, send: Span, blocks: Spans | None, root: int) -> list[Exchange]:
    """The root's block r is what rank r sends; any counts and places."""
    receives = tuple(_needed(blocks)) if rank == root else (None,) * size
    return [Exchange(dtype, _only(root, send, size), receives)]


def scatter(rank: int, size: int, dtype: Dtype, blocks: Spans | None, output: Span, root: int) -> list[Exchange]:
    """Rank r's ``output`` is the root's block r; any counts and places."""
    sends = tuple(_needed(blocks)) if rank == root else (None,) * size
    return [Exchange(dtype, sends, _only(root, output, size))]


def alltoall(rank: int, size: int, dtype: Dtype, send_blocks: Spans, blocks: Spans) -> list[Exchange]:
    """Block r of rank s is what rank r has in its send block s; any counts and places."""
    return [Exchange(dtype, tuple(send_blocks), tuple(blocks), lands=(blocks[rank],) * size)]


def bcast(
    rank: int, size: int, dtype: Dtype, buffer: Span, root: int, *, piece_nbytes: int | None = None
) -> list[Exchange]:
    """Every rank's ``buffer`` is the root's.

    The root sends all to all, or with ``piece_nbytes`` "scatter_allgather": piece after piece, the root sends each rank
    a shard, which that sends on to the others: where what one rank can send is the limit.
    """
    if piece_nbytes is None:
        sends = tuple(buffer if rank == root != peer else None for peer in range(size))
        return [Exchange(dtype, sends, _only(root, None if rank == root else buffer, size), lands=(buffer,) * size)]
    steps = []
    for piece in _pieces(buffer, dtype, piece_nbytes):
        shards = split(piece, size, dtype.itemsize)
        steps += scatter(rank, size, dtype, shards, shards[rank], root)
        others = tuple(None if peer in (rank, root) else shards[rank] for peer in range(size))
        receives = tuple(None if rank in (peer, root) else shard for peer, shard in enumerate(shards))
        steps.append(Exchange(dtype, others, receives))
    return steps


def relayed_bcast(rank: int, size: int, dtype: Dtype, buffer: Span, root: int) -> list[Exchange]:
    """As bcast: the root sends each other rank a shard, which that sends on. What the root sends is the whole, once."""
    shards = _split_without(root, buffer, size, dtype.itemsize)
    nowhere: tuple[None, ...] = (None,) * size
    others = tuple(shards[rank] if peer not in (rank, root) and rank != root else None for peer in range(size))
    receives = tuple(shard if rank not in (peer, root) and peer != root else None for peer, shard in enumerate(shards))
    sends = tuple(shards) if rank == root else nowhere
    first = Exchange(dtype, sends, _only(root, shards[rank] if rank != root else None, size), lands=tuple(shards))
    return [first, Exchange(dtype, others, receives, lands=(shards[rank],) * size)]


def relayed_reduce(
    rank: int, size: int, dtype: Dtype, send: Span, output: Span | None, op: str, root: int
) -> list[Exchange]:
    """As reduce: each rank but the root reduces a shard and sends it to the root, which receives the whole, once.

    For engines that send a result on without storing it: on all ranks but the root it lies at address 0.
    """
    shards = _split_without(root, send, size, dtype.itemsize)
    if rank == root:
        results = _split_without(root, _needed(output), size, dtype.itemsize)
        nowhere: tuple[None, ...] = (None,) * size
        return [Exchange(dtype, tuple(shards), nowhere), Exchange(dtype, nowhere, tuple(results))]
    result = Span(0, shards[rank].count)
    return [
        _reduce_blocks(rank, size, dtype, shards, result, op),
        Exchange(dtype, _only(root, result, size), (None,) * size),
    ]


def chained_bcast(rank: int, size: int, dtype: Dtype, buffer: Span, root: int) -> list[Exchange]:
    """As bcast: each rank sends all to the next one, the last one to nobody."""
    hops = [((root + hop) % size, (root + hop + 1) % size) for hop in range(size - 1)]
    return [
        Exchange(
            dtype,
            _only(receiver, buffer if rank == sender else None, size),
            _only(sender, buffer if rank == receiver else None, size),
        )
        for sender, receiver in hops
    ]


def chained_reduce(
    rank: int, size: int, dtype: Dtype, send: Span, output: Span | None, op: str, root: int
) -> list[Exchange]:
    """As reduce: each rank sends the next one the reduction of all up to itself; the root is the first or last rank.

    For engines that send a result on without storing it: on all ranks but the root it lies at address 0. Partial
    results travel as ``dtype``, which is for operations that do not widen it: see `device_selection.can_chain`.
    """
    partial = Span(0, send.count)
    steps = []
    for receiver in range(1, size):
        sent = send if receiver == 1 else partial
        reduction = None
        if rank == receiver:
            result = _needed(output) if receiver == root else partial
            reduction = Reduction(op, (rank - 1, rank), send, result)
        sends = _only(receiver, sent if rank == receiver - 1 else None, size)
        steps.append(Exchange(dtype, sends, (None,) * size, reduction))
    if root == 0 and size > 1:
        sends = _only(0, partial if rank == size - 1 else None, size)
        steps.append(Exchange(dtype, sends, _only(size - 1, output if rank == 0 else None, size)))
    return steps


def scan(rank: int, size: int, dtype: Dtype, send: Span, output: Span, op: str) -> list[Exchange]:
    """Rank r's ``output`` is the reduction of ``send`` of the ranks up to r."""
    reduction = Reduction(op, tuple(range(rank + 1)), send, output)
    return [Exchange(dtype, _to_later(rank, send, size), (None,) * size, reduction)]


def exscan(rank: int, size: int, dtype: Dtype, send: Span, output: Span | None, op: str) -> list[Exchange]:
    """Rank r's ``output`` is the reduction of ``send`` of the ranks before r; rank 0's is left alone."""
    reduction = Reduction(op, tuple(range(rank)), None, _needed(output)) if rank else None
    return [Exchange(dtype, _to_later(rank, send, size), (None,) * size, reduction)]


def _split_without(root: int, span: Span, size: int, itemsize: int) -> list[Span]:
    shards = split(span, size - 1, itemsize)
    return [*shards[:root], Span(span.pointer, 0), *shards[root:]]


def _reduce_blocks(rank: int, size: int, dtype: Dtype, blocks: Spans, output: Span, op: str) -> Exchange:
    sends = tuple(None if peer == rank else block for peer, block in enumerate(blocks))
    return Exchange(dtype, sends, (None,) * size, Reduction(op, tuple(range(size)), blocks[rank], output))


def _to_later(rank: int, send: Span, size: int) -> tuple[Span | None, ...]:
    return tuple(send if peer > rank else None for peer in range(size))


def _only(peer: int, span: Span | None, size: int) -> tuple[Span | None, ...]:
    return tuple(span if index == peer else None for index in range(size))


def _part(span: Span, start: int, stop: int, itemsize: int) -> Span:
    return Span(span.pointer + start * itemsize, stop - start)


def _pieces(span: Span, dtype: Dtype, piece_nbytes: int) -> list[Span]:
    step = max(1, piece_nbytes // dtype.itemsize)
    starts = range(0, span.count, step)
    return [_part(span, start, min(start + step, span.count), dtype.itemsize) for start in starts]


def _needed(value: T | None) -> T:
    if value is None:
        raise InvalidUsageError("a buffer that this rank needs was not given")
    return value
