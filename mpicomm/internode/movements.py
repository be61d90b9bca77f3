"""Schedules of the collectives over several cliques that only move data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpicomm.collectives.operations import ALLGATHER, ALLGATHERV, ALLTOALLV, BCAST, GATHERV, SCATTERV
from mpicomm.collectives.patterns import Buffers, split
from mpicomm.internode.layout import Layout
from mpicomm.internode.steps import Local, Move, Parcel, Room, Step, Wire
from mpicomm.mpi.span import Span

NOTHING = Span(0, 0)
"""An empty block."""


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


def allgather(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """Each rank sends its block to its partner in every other clique; then the cliques gather, clique by clique.

    Each block crosses the network once per clique, and all network cards carry the same where blocks are equal.
    """
    assert b.blocks is not None
    blocks = b.blocks
    send = blocks[b.rank] if b.send is None else b.send
    yield Wire(
        tuple(Parcel.of(layout.partner(b.rank, clique), send, b.dtype) for clique in layout.others),
        tuple(Parcel.of(rank, blocks[rank], b.dtype) for clique in layout.others for rank in layout.served(clique)),
    )
    clique_size = len(layout.ranks)
    for clique in range(len(layout.cliques)):
        owners = layout.cliques[clique]
        for first in range(0, len(owners), clique_size):
            turn = [blocks[rank] for rank in owners[first : first + clique_size]]
            turn += [NOTHING] * (clique_size - len(turn))
            own = send if clique == layout.number else turn[layout.index]
            yield allgather_in_clique(layout, b.dtype, own, turn)


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


def bcast_in_two_steps(b: Buffers, layout: Layout, room: Room) -> Iterator[Step]:
    """The root scatters shards in its clique, one for each rail; the rails bring them to all cliques, which gather.

    Each rail cuts its shard into a part for each other clique, and these exchange their parts. So every network card
    carries its shard about once, however many cliques there are.
    """
    assert b.output is not None
    itemsize, index, number = b.dtype.itemsize, layout.index, layout.number
    shards = rail_shards(b.output, layout, b.dtype)
    home = layout.clique_of(b.root)
    away = [clique for clique in range(len(layout.cliques)) if clique != home]
    on_rail = index < layout.rails
    parts = dict(zip(away, split(shards[index], len(away), itemsize), strict=True)) if on_rail else {}
    rail = {clique: layout.cliques[clique][index] for clique in parts}

    def parcel(to_or_from: int, clique: int) -> Parcel:
        """Return the parcel with the part of a clique."""
        return Parcel.of(to_or_from, parts[clique], b.dtype)

    if number == home:
        given = shards if b.rank == b.root else None
        root = layout.index_of(b.root)
        yield Local(SCATTERV, in_clique(layout, b.dtype, root=root, send_blocks=given, output=shards[index]))
        yield Wire(sends=tuple(parcel(rank, clique) for clique, rank in rail.items()))
        yield Wire()
    else:
        source = layout.cliques[home][index] if on_rail else b.root
        yield Wire(receives=(parcel(source, number),) if on_rail else ())
        others = {clique: rank for clique, rank in rail.items() if clique != number}
        yield Wire(
            tuple(parcel(rank, number) for rank in others.values()),
            tuple(parcel(rank, clique) for clique, rank in others.items()),
        )
    yield allgather_in_clique(layout, b.dtype, shards[index], shards)
