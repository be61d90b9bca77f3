"""Schedules of the reductions over several cliques: reduce in the clique, exchange between cliques, reduce again.

**Order.** The ranks of a clique are reduced in their order, then the results of the cliques in the order of the
cliques. All ranks compute with the same numbers in the same order, so results are bitwise the same on all ranks and in
every run of the same layout, whatever engine carries the data. They may differ from the result of one clique, whose
order is that of the ranks alone.

**Rounding.** Sums, products, averages and operations of the user on floats of 16 bits or fewer are computed in float32
from the first step on, travel as float32, and are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives.operations import ALLREDUCE, GATHERV, REDUCE_SCATTER, REDUCE_SCATTER_BLOCK
from mpicomm.collectives.patterns import Buffers, split
from mpicomm.internode.layout import Layout
from mpicomm.internode.movements import NOTHING, allgather, allgather_in_clique, cut_alike, in_clique, rail_shards
from mpicomm.internode.steps import Combine, Local, Move, Parcel, Room, Slots, Step, Wire
from mpicomm.mpi.span import Span
from mpicomm.mpi.types import is_narrow

_WIDE = np.dtype(np.float32)
_EXACT = ("max", "min", "land", "lor", "lxor")  # the operations whose results need no rounding


def allreduce_in_one_step(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """All-reduce in each clique; the partners of all cliques exchange the results. One message each: for small data."""
    send, output = _both(b)
    dtype, op, source = yield from _widened(b, send, room)
    nbytes = send.count * dtype.itemsize
    partials = Slots.take(room, len(layout.cliques), nbytes)
    own = partials[layout.number]
    yield Local(ALLREDUCE, in_clique(layout, dtype, op, send=source, output=Span(own, send.count)))
    yield Wire(
        tuple(Parcel(rank, own, nbytes) for clique in layout.others for rank in layout.served(clique)),
        tuple(Parcel(layout.partner(layout.rank, clique), partials[clique], nbytes) for clique in layout.others),
    )
    yield _combined(b, dtype, op, partials, output)


def allreduce_in_two_steps(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Reduce-scatter in each clique, then among the ranks of each rail; all-gather along each rail, then in the clique.

    Each rail has a shard, so all network cards carry the same bytes, twice their part of the data. In each rail every
    rank reduces a part of the shard: two messages between each two ranks, for large data.
    """
    send, output = _both(b)
    dtype, op, source = yield from _widened(b, send, room)
    number, index, cliques = layout.number, layout.index, len(layout.cliques)
    results = rail_shards(output, layout, b.dtype)
    shards = cut_alike(source, results, dtype)
    shard = Span(room.take(shards[index].count * dtype.itemsize), shards[index].count)
    yield _reduce_scatter_in_clique(layout, dtype, op, shards, shard)
    places = split(results[index], cliques, b.dtype.itemsize)
    parts = cut_alike(shard, places, dtype)
    nbytes = parts[number].count * dtype.itemsize
    slots = Slots.take(room, cliques, nbytes)
    rail = {clique: layout.cliques[clique][index] for clique in layout.others} if index < layout.rails else {}
    yield Wire(
        tuple(Parcel.of(rank, parts[clique], dtype) for clique, rank in rail.items()),
        tuple(Parcel(rank, slots[clique], nbytes) for clique, rank in rail.items()),
    )
    yield Move(slots[number], parts[number].pointer, nbytes)
    yield _combined(b, dtype, op, slots, places[number])
    yield Wire(
        tuple(Parcel.of(rank, places[number], b.dtype) for rank in rail.values()),
        tuple(Parcel.of(rank, places[clique], b.dtype) for clique, rank in rail.items()),
    )
    yield allgather_in_clique(layout, b.dtype, results[index], results)


def reduce(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Reduce-scatter in each clique; each rail brings its shards to the root's clique, which gathers the results."""
    assert b.send is not None
    dtype, op, source = yield from _widened(b, b.send, room)
    home, index = layout.clique_of(b.root), layout.index
    at_home = layout.number == home
    shards = cut_alike(source, rail_shards(b.send, layout, b.dtype), dtype)
    count = shards[index].count
    nbytes = count * dtype.itemsize
    slots = Slots.take(room, len(layout.cliques) if at_home else 1, nbytes)
    own = slots[layout.number if at_home else 0]
    yield _reduce_scatter_in_clique(layout, dtype, op, shards, Span(own, count))
    if not at_home:
        yield Wire(sends=(Parcel(layout.cliques[home][index], own, nbytes),) if index < layout.rails else ())
        return
    others = layout.others if index < layout.rails else ()
    yield Wire(receives=tuple(Parcel(layout.cliques[clique][index], slots[clique], nbytes) for clique in others))
    result = Span(room.take(count * b.dtype.itemsize), count)
    yield _combined(b, dtype, op, slots, result)
    blocks = None if b.rank != b.root or b.output is None else rail_shards(b.output, layout, b.dtype)
    root = layout.index_of(b.root)
    yield Local(GATHERV, in_clique(layout, b.dtype, root=root, send=result, blocks=blocks))


def reduce_scatter(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Each clique reduces the blocks of all ranks, each on the rank that is the owner's partner and sends it there."""
    assert b.send_blocks is not None and b.output is not None
    dtype, op = _accumulated(b)
    blocks = list(b.send_blocks)
    if dtype != b.dtype:
        for rank, block in enumerate(b.send_blocks):
            blocks[rank] = Span(room.take(block.count * dtype.itemsize), block.count)
            yield _converted(b, block, blocks[rank], dtype)
    nbytes = b.output.count * dtype.itemsize
    slots = Slots.take(room, len(layout.cliques), nbytes)
    sends = []
    clique_size = len(layout.ranks)
    for clique in (layout.number, *layout.others):
        owners = layout.cliques[clique]
        for first in range(0, len(owners), clique_size):
            turn = owners[first : first + clique_size]
            given = [blocks[rank] for rank in turn] + [NOTHING] * (clique_size - len(turn))
            count = given[layout.index].count
            if clique == layout.number:
                target = slots[layout.number]
            else:
                target = room.take(count * dtype.itemsize)
                sends += [Parcel(rank, target, count * dtype.itemsize) for rank in turn[layout.index :][:1]]
            yield _reduce_scatter_in_clique(layout, dtype, op, given, Span(target, count))
    yield Wire(
        tuple(sends),
        tuple(Parcel(layout.partner(layout.rank, clique), slots[clique], nbytes) for clique in layout.others),
    )
    yield _combined(b, dtype, op, slots, b.output)


def scan(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Bring the data of all ranks to every rank, which reduces those up to its own."""
    yield from _prefix(b, layout, room, b.rank + 1)


def exscan(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Bring the data of all ranks to every rank, which reduces those before its own; the first rank writes nothing."""
    yield from _prefix(b, layout, room, b.rank)


def _prefix(b: Buffers, layout: Layout, room: Room, ranks: int) -> Iterator[Step]:
    send, output = _both(b)
    nbytes = send.count * b.dtype.itemsize
    slots = Slots.take(room, layout.size, nbytes)
    gathered = replace(b, output=None, blocks=[Span(slots[rank], send.count) for rank in range(layout.size)], op="")
    yield from allgather(gathered, layout, room)
    if ranks == 1:  # a single contribution is the result, also where the operation would change it
        yield Move(output.pointer, slots[0], nbytes)
    elif ranks:
        divisor = ranks if b.op == "avg" else 1
        op = "sum" if b.op == "avg" else b.op
        yield Combine(op, b.dtype, slots[0], slots.stride, ranks, send.count, output.pointer, b.dtype, divisor)


def _accumulated(b: Buffers) -> tuple[np.dtype[Any], str]:
    """Return the type in which partial results travel, and the operation with which they are reduced."""
    wide = is_narrow(b.dtype) and b.op not in _EXACT
    return (_WIDE if wide else b.dtype), ("sum" if b.op == "avg" else b.op)


def _widened(b: Buffers, send: Span, room: Room) -> Generator[Step, None, tuple[np.dtype[Any], str, Span]]:
    """Convert the input where partial results travel in a wider type; return that type, the operation, the input."""
    dtype, op = _accumulated(b)
    if dtype == b.dtype:
        return dtype, op, send
    wide = Span(room.take(send.count * dtype.itemsize), send.count)
    yield _converted(b, send, wide, dtype)
    return dtype, op, wide


def _converted(b: Buffers, source: Span, target: Span, dtype: np.dtype[Any]) -> Combine:
    return Combine("sum", b.dtype, source.pointer, 0, 1, source.count, target.pointer, dtype)


def _combined(b: Buffers, dtype: np.dtype[Any], op: str, slots: Slots, output: Span) -> Combine:
    """Reduce the partial results of all cliques, one in each slot, to the result."""
    divisor = b.size if b.op == "avg" else 1
    return Combine(op, dtype, slots[0], slots.stride, slots.number, output.count, output.pointer, b.dtype, divisor)


def _reduce_scatter_in_clique(
    layout: Layout, dtype: np.dtype[Any], op: str, blocks: Sequence[Span], output: Span
) -> Local:
    """Reduce block i of all ranks of the clique on the rank with index i."""
    operation = REDUCE_SCATTER_BLOCK if len({block.count for block in blocks}) == 1 else REDUCE_SCATTER
    return Local(operation, in_clique(layout, dtype, op, send_blocks=blocks, output=output))


def _both(b: Buffers) -> tuple[Span, Span]:
    assert b.send is not None and b.output is not None
    return b.send, b.output
