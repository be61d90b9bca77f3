"""Schedules of the collectives over several cliques that only move data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpicomm.collectives.operations import ALLGATHER, ALLGATHERV, ALLTOALLV, BCAST, GATHERV, SCATTERV
from mpicomm.collectives.patterns import Buffers, split
from mpicomm.domains.layout import Layout
from mpicomm.domains.steps import Local, Move, Pack, Parcel, Room, Step, Wire
from mpicomm.mpi.span import Span


def in_clique(layout: Layout, dtype: np.dtype[Any], op: str = "", root: int = 0, **memory: Any) -> Buffers:
    """Return this rank's memory for a collective of its clique; ``root`` is an index in the clique."""
    return Buffers(layout.index, len(layout.ranks), dtype, op=op, root=root, **memory)


def allgather_in_clique(layout: Layout, dtype: np.dtype[Any], send: Span, blocks: Sequence[Span]) -> Local:
    """Bring block i from the rank with index i to all ranks of the clique."""
    operation = ALLGATHER if len({block.count for block in blocks}) == 1 else ALLGATHERV
    return Local(operation, in_clique(layout, dtype, send=send, blocks=blocks))


def rail_shards(span: Span, layout: Layout, dtype: np.dtype[Any]) -> list[Span]:
    """Return a shard of a span for each rank of the clique; those beyond the rails have empty ones."""
    shards = split(span, layout.rails, dtype.itemsize)
    return shards + [Span(span.pointer, 0)] * (len(layout.ranks) - layout.rails)


def cut_alike(span: Span, parts: Sequence[Span], dtype: np.dtype[Any]) -> list[Span]:
    """Return parts of a span of another element type, with the counts of ``parts`` of an equally long span."""
    ends = itertools.accumulate(part.count for part in parts)
    return [
        Span(span.pointer + (end - part.count) * dtype.itemsize, part.count)
        for end, part in zip(ends, parts, strict=True)
    ]


def in_turn(blocks: Sequence[Span], turn: Sequence[int], layout: Layout) -> list[Span]:
    """Return a block for each rank of the clique, in a turn of ranks of another clique; there may be fewer of them."""
    return [blocks[rank] for rank in turn] + [Span(0, 0)] * (len(layout.ranks) - len(turn))


def one_after_the_other(
    blocks: Sequence[Span], rows: Sequence[Sequence[int]], start: int, dtype: np.dtype[Any]
) -> tuple[dict[int, Span], list[Span]]:
    """Return the place of each rank's block in memory from ``start`` on, and the span of each row of ranks."""
    places: dict[int, Span] = {}
    spans = []
    for row in rows:
        spans.append(Span(start, sum(blocks[rank].count for rank in row)))
        for rank in row:
            places[rank] = Span(start, blocks[rank].count)
            start += blocks[rank].count * dtype.itemsize
    return places, spans


def allgather(b: Buffers, layout: Layout, distances: Sequence[int], room: Room) -> Iterator[Step]:
    """Bring the blocks of the cliques that lie ``distances`` places ahead to all ranks of this clique.

    Each rank sends its block to its partners in the cliques as many places behind, and receives the blocks of the ranks
    that it serves. Then the clique gathers what its ranks have received. Distance 0 is the clique itself.

    The blocks of one clique go straight to their places. The blocks of several cliques that one rank has received lie
    apart in the output, so the clique gathers them in scratch memory, and each rank copies them to their places.
    """
    assert b.blocks is not None
    blocks, exchanged = b.blocks, [distance for distance in distances if distance]
    send = blocks[b.rank] if b.send is None else b.send
    sources = [layout.ahead(distance) for distance in distances]
    rows = layout.served_by_each(sources)
    packed = [blocks[rank] for row in rows for rank in row] if len(sources) > 1 and len(rows) > 1 else []
    start = room.take(sum(block.count for block in packed) * b.dtype.itemsize)
    places, spans = one_after_the_other(blocks, rows, start, b.dtype)
    received = [rank for distance in exchanged for rank in layout.served(layout.ahead(distance))]
    yield Wire(
        tuple(Parcel.of(layout.partner(b.rank, layout.ahead(-distance)), send, b.dtype) for distance in exchanged),
        tuple(Parcel.of(rank, places[rank] if packed else blocks[rank], b.dtype) for rank in received),
    )
    if packed:
        yield allgather_in_clique(layout, b.dtype, spans[layout.index], spans)
        yield Pack.of(packed, start, b.dtype, unpacks=True)
    elif len(rows) > 1 or 0 in distances:
        for turn in (turn for clique in sources for turn in layout.turns(clique)):
            given = in_turn(blocks, turn, layout)
            own = send if b.rank in turn else given[layout.index]
            yield allgather_in_clique(layout, b.dtype, own, given)


def alltoall(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Every rank sends straight to every rank of the other cliques; each byte crosses the network once."""
    assert b.blocks is not None
    itemsize = b.dtype.itemsize
    sends = b.send_blocks
    if sends is None:  # in place: a block would be overwritten before it is sent
        sends = []
        for block in b.blocks:
            copy = Span(room.take(block.count * itemsize), block.count)
            yield Move(copy.pointer, block.pointer, block.count * itemsize)
            sends.append(copy)
    others = layout.elsewhere
    yield Wire(
        tuple(Parcel.of(rank, sends[rank], b.dtype) for rank in others),
        tuple(Parcel.of(rank, b.blocks[rank], b.dtype) for rank in others),
    )
    here = [sends[rank] for rank in layout.ranks], [b.blocks[rank] for rank in layout.ranks]
    cuts = [b.cuts[rank] for rank in layout.ranks] if b.cuts else ()
    yield Local(ALLTOALLV, in_clique(layout, b.dtype, send_blocks=here[0], blocks=here[1], cuts=cuts))


def gather(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """The ranks of other cliques send straight to the root; the root's clique gathers. Counts may be private."""
    if layout.number != layout.clique_of(b.root):
        assert b.send is not None
        yield Wire(sends=(Parcel.of(b.root, b.send, b.dtype),))
        return
    blocks = None
    if b.rank == b.root:
        assert b.blocks is not None
        yield Wire(receives=tuple(Parcel.of(rank, b.blocks[rank], b.dtype) for rank in layout.elsewhere))
        blocks = [b.blocks[rank] for rank in layout.ranks]
    else:
        yield Wire()
    root = layout.index_of(b.root)
    yield Local(GATHERV, in_clique(layout, b.dtype, root=root, send=b.send, blocks=blocks))


def scatter(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """The root sends straight to the ranks of other cliques, and scatters in its clique. Counts may be private."""
    if layout.number != layout.clique_of(b.root):
        assert b.output is not None
        yield Wire(receives=(Parcel.of(b.root, b.output, b.dtype),))
        return
    sends = None
    if b.rank == b.root:
        assert b.send_blocks is not None
        yield Wire(tuple(Parcel.of(rank, b.send_blocks[rank], b.dtype) for rank in layout.elsewhere))
        sends = [b.send_blocks[rank] for rank in layout.ranks]
    else:
        yield Wire()
    root = layout.index_of(b.root)
    yield Local(SCATTERV, in_clique(layout, b.dtype, root=root, send_blocks=sends, output=b.output))


def bcast_in_one_step(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """The root sends to its partner in every other clique; each clique broadcasts. For small data."""
    assert b.output is not None
    nbytes = b.output.count * b.dtype.itemsize
    home = layout.clique_of(b.root)
    source = b.root if layout.number == home else layout.partner(b.root, layout.number)
    if b.rank == b.root:
        yield Wire(
            sends=tuple(Parcel(layout.partner(b.root, clique), b.output.pointer, nbytes) for clique in layout.others)
        )
    elif b.rank == source:
        yield Wire(receives=(Parcel(b.root, b.output.pointer, nbytes),))
    else:
        yield Wire()
    yield Local(BCAST, in_clique(layout, b.dtype, root=layout.index_of(source), output=b.output))


def bcast_by_rails(b: Buffers, before: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """The root's clique broadcasts a piece; each rail brings a shard of it to all other cliques, which gather.

    Each rank of the root's clique cuts its shard into a part for each other clique. While it sends the parts of this
    piece, the others of its rail exchange their parts of the piece before. So a piece has one network step, in which
    every card carries about one shard, however many cliques there are. The first and the last piece meet empty ones.
    """
    assert b.output is not None and before.output is not None
    index, number, home = layout.index, layout.number, layout.clique_of(b.root)
    away = [clique for clique in range(len(layout.cliques)) if clique != home]
    rail = {clique: layout.cliques[clique][index] for clique in away} if index < layout.rails else {}
    shards, shards_before = (rail_shards(each, layout, b.dtype) for each in (b.output, before.output))
    new, old = (
        dict(zip(away, split(each[index], len(away), b.dtype.itemsize), strict=True))
        for each in (shards, shards_before)
    )
    if number == home:
        if b.output.count:
            yield Local(BCAST, in_clique(layout, b.dtype, root=layout.index_of(b.root), output=b.output))
        yield Wire(sends=tuple(Parcel.of(rank, new[clique], b.dtype) for clique, rank in rail.items()))
        return
    others = {clique: rank for clique, rank in rail.items() if clique != number}
    source = (Parcel.of(layout.cliques[home][index], new[number], b.dtype),) if rail else ()
    yield Wire(
        tuple(Parcel.of(rank, old[number], b.dtype) for rank in others.values()),
        (*source, *(Parcel.of(rank, old[clique], b.dtype) for clique, rank in others.items())),
    )
    if before.output.count:
        yield allgather_in_clique(layout, b.dtype, shards_before[index], shards_before)
