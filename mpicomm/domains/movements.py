"""Schedules of the collectives over several peer domains that only move data."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpicomm.collectives.operations import ALLGATHER, ALLGATHERV, ALLTOALLV, BCAST, GATHERV, SCATTERV
from mpicomm.collectives.patterns import Buffers, split
from mpicomm.domains.steps import DomainLayout, DomainStep, NetworkStep, Pack, ScratchAllocator, Step
from mpicomm.mpi.arguments import Span


def in_domain(layout: DomainLayout, dtype: np.dtype[Any], op: str = "", root: int = 0, **memory: Any) -> Buffers:
    """Return this rank's memory for a collective of its domain; ``root`` is an index in the domain."""
    return Buffers(layout.index, len(layout.ranks), dtype, op=op, root=root, **memory)


def allgather_in_domain(layout: DomainLayout, dtype: np.dtype[Any], send: Span, blocks: Sequence[Span]) -> DomainStep:
    """Bring block i from the rank with index i to all ranks of the domain."""
    operation = ALLGATHER if len({block.count for block in blocks}) == 1 else ALLGATHERV
    return DomainStep(operation, in_domain(layout, dtype, sends=[send], receives=blocks))


def rail_shards(span: Span, layout: DomainLayout, dtype: np.dtype[Any]) -> list[Span]:
    """Shard a span over the ranks of the domain. Ranks without a rail have empty shards."""
    shards = split(span, layout.rails, dtype.itemsize)
    return shards + [Span(span.pointer, 0)] * (len(layout.ranks) - layout.rails)


def split_like(span: Span, parts: Sequence[Span], dtype: np.dtype[Any]) -> list[Span]:
    """Split a span of another element type into parts with the counts of ``parts``, which make up as long a span."""
    ends = itertools.accumulate(part.count for part in parts)
    return [
        Span(span.pointer + (end - part.count) * dtype.itemsize, part.count)
        for end, part in zip(ends, parts, strict=True)
    ]


def blocks_of_round(blocks: Sequence[Span], ranks: Sequence[int], layout: DomainLayout) -> list[Span]:
    """Return a block for each rank of the domain: those of a round of ``ranks`` of another domain, then empty ones."""
    return [blocks[rank] for rank in ranks] + [Span(0, 0)] * (len(layout.ranks) - len(ranks))


def pack_rows(
    blocks: Sequence[Span], rows: Sequence[Sequence[int]], start: int, dtype: np.dtype[Any]
) -> tuple[dict[int, Span], list[Span]]:
    """Place blocks contiguously from ``start`` on. Return the span of each rank's block, and of each row of ranks."""
    packed: dict[int, Span] = {}
    spans = []
    for row in rows:
        spans.append(Span(start, sum(blocks[rank].count for rank in row)))
        for rank in row:
            packed[rank] = Span(start, blocks[rank].count)
            start += blocks[rank].count * dtype.itemsize
    return packed, spans


def allgather(b: Buffers, layout: DomainLayout, distances: Sequence[int], scratch: ScratchAllocator) -> Iterator[Step]:
    """All-gather in this domain the blocks of the domains that lie ``distances`` domains ahead.

    Each rank sends its block to its partners in the domains that lie as far behind this domain. It receives the blocks
    of the ranks that it serves. Then the domain all-gathers the blocks that its ranks have received. Distance 0 is the
    domain itself.

    The blocks of one domain go directly to the output. If a rank receives blocks of several domains, these are not
    contiguous in the output. So the domain gathers them in scratch memory, and each rank copies them to the output.
    """
    blocks, exchanged = b.receives, [distance for distance in distances if distance]
    send = b.sends[0] if b.sends else blocks[b.rank]
    sources = [layout.ahead(distance) for distance in distances]
    rows = layout.served_by_each(sources)
    unpacked = [blocks[rank] for row in rows for rank in row] if len(sources) > 1 and len(rows) > 1 else []
    start = scratch.take(sum(block.count for block in unpacked) * b.dtype.itemsize)
    packed, spans = pack_rows(blocks, rows, start, b.dtype)
    received = [rank for distance in exchanged for rank in layout.served(layout.ahead(distance))]
    partners = [layout.partner(b.rank, layout.ahead(-distance)) for distance in exchanged]
    arriving = [(rank, packed[rank] if unpacked else blocks[rank]) for rank in received]
    yield NetworkStep.of(b.dtype, [(rank, send) for rank in partners], arriving)
    if unpacked:
        yield allgather_in_domain(layout, b.dtype, spans[layout.index], spans)
        yield Pack.of(unpacked, start, b.dtype, unpacks=True)
    elif len(rows) > 1 or 0 in distances:
        for ranks in (ranks for domain in sources for ranks in layout.rounds(domain)):
            outputs = blocks_of_round(blocks, ranks, layout)
            own = send if b.rank in ranks else outputs[layout.index]
            yield allgather_in_domain(layout, b.dtype, own, outputs)


def alltoall(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """Every rank sends directly to every rank of the other domains; each byte crosses the network once."""
    sends = b.sends
    if not sends:  # in place: a receive would overwrite a block before it is sent
        sends = [scratch.span(block.count, b.dtype) for block in b.receives]
        for copy, block in zip(sends, b.receives, strict=True):
            yield Pack.of([block], copy.pointer, b.dtype)
    leaving, arriving = ([(rank, each[rank]) for rank in layout.remote_ranks] for each in (sends, b.receives))
    yield NetworkStep.of(b.dtype, leaving, arriving)
    here = [sends[rank] for rank in layout.ranks], [b.receives[rank] for rank in layout.ranks]
    hashes = tuple(b.block_hashes[rank] for rank in layout.ranks) if b.block_hashes else ()
    yield DomainStep(ALLTOALLV, in_domain(layout, b.dtype, sends=here[0], receives=here[1], block_hashes=hashes))


def gather(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """The ranks of other domains send directly to the root; the root's domain gathers. Counts may be private."""
    if layout.domain != layout.domain_of(b.root):
        yield NetworkStep.of(b.dtype, [(b.root, b.sends[0])])
        return
    is_root, root = b.rank == b.root, layout.index_of(b.root)
    yield NetworkStep.of(b.dtype, receives=[(rank, b.receives[rank]) for rank in layout.remote_ranks if is_root])
    blocks = [b.receives[rank] for rank in layout.ranks if is_root]
    yield DomainStep(GATHERV, in_domain(layout, b.dtype, root=root, sends=b.sends, receives=blocks))


def scatter(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """The root sends directly to the ranks of other domains, and scatters in its domain. Counts may be private."""
    if layout.domain != layout.domain_of(b.root):
        yield NetworkStep.of(b.dtype, receives=[(b.root, b.receives[0])])
        return
    is_root, root = b.rank == b.root, layout.index_of(b.root)
    yield NetworkStep.of(b.dtype, [(rank, b.sends[rank]) for rank in layout.remote_ranks if is_root])
    blocks = [b.sends[rank] for rank in layout.ranks if is_root]
    yield DomainStep(SCATTERV, in_domain(layout, b.dtype, root=root, sends=blocks, receives=b.receives))


def bcast_in_one_step(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """The root sends to its partner in every other domain; each domain broadcasts. For small data."""
    buffer, home = b.receives[0], layout.domain_of(b.root)
    source = b.root if layout.domain == home else layout.partner(b.root, layout.domain)
    leaving = [(layout.partner(b.root, domain), buffer) for domain in layout.other_domains if b.rank == b.root]
    arriving = [(b.root, buffer)] if b.rank == source != b.root else []
    yield NetworkStep.of(b.dtype, leaving, arriving)
    yield DomainStep(BCAST, in_domain(layout, b.dtype, root=layout.index_of(source), receives=[buffer]))


def bcast_by_rails(b: Buffers, before: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """The root's domain broadcasts a piece. Each rail brings a shard of it to all other domains, which all-gather it.

    Each rank of the root's domain splits its shard into a part for each other domain. While it sends the parts of this
    piece, the other ranks of its rail exchange their parts of the previous piece. So a piece has one network step, in
    which every card carries about one shard, however many domains there are. There is an empty piece before the first
    and after the last.
    """
    index, number, home = layout.index, layout.domain, layout.domain_of(b.root)
    away = [domain for domain in range(len(layout.domains)) if domain != home]
    rail = {domain: layout.domains[domain][index] for domain in away} if index < layout.rails else {}
    shards, shards_before = (rail_shards(each, layout, b.dtype) for each in (b.receives[0], before.receives[0]))
    new, old = (
        dict(zip(away, split(each[index], len(away), b.dtype.itemsize), strict=True))
        for each in (shards, shards_before)
    )
    if number == home:
        if b.receives[0].count:
            yield DomainStep(BCAST, in_domain(layout, b.dtype, root=layout.index_of(b.root), receives=b.receives))
        yield NetworkStep.of(b.dtype, [(rank, new[domain]) for domain, rank in rail.items()])
        return
    others = {domain: rank for domain, rank in rail.items() if domain != number}
    source = [(layout.domains[home][index], new[number])] if rail else []
    arriving = [*source, *((rank, old[domain]) for domain, rank in others.items())]
    yield NetworkStep.of(b.dtype, [(rank, old[number]) for rank in others.values()], arriving)
    if before.receives[0].count:
        yield allgather_in_domain(layout, b.dtype, shards_before[index], shards_before)
