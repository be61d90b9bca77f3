"""Schedules of the reductions over several domains: reduce in the domain, exchange between domains, reduce again.

**Order.** A domain reduces in rank order. Then the results of the domains are reduced in the order of the domains. All
ranks compute with the same numbers in the same order. So results are bitwise the same on all ranks and in every run of
the same layout, with every transport. They may differ from the result in a single domain, which reduces all ranks in
their order.

**Rounding.** Sums, products, averages and operations of the user on floats of 16 bits or fewer accumulate in float32
from the first step on. Partial results are float32, and are rounded once, at the end.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.host.reduction import Reducer
from mpicomm.collectives.operations import ALLREDUCE, GATHERV, REDUCE_SCATTER, REDUCE_SCATTER_BLOCK
from mpicomm.collectives.patterns import Buffers, split
from mpicomm.domains.movements import (
    allgather,
    allgather_in_domain,
    blocks_of_round,
    in_domain,
    pack_rows,
    rail_shards,
    split_like,
)
from mpicomm.domains.steps import (
    ALIGNED_NBYTES,
    Combine,
    DomainLayout,
    DomainStep,
    NetworkStep,
    Pack,
    ScratchAllocator,
    Step,
)
from mpicomm.mpi.arguments import Span
from mpicomm.mpi.types import is_narrow

_WIDE = np.dtype(np.float32)
_EXACT = ("max", "min", "land", "lor", "lxor")  # the results of these operations need no rounding


def allreduce_in_one_step(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """All-reduce in each peer domain; then partners of all domains exchange the results. For small data."""
    send, output = b.sends[0], b.receives[0]
    dtype, op, source = yield from _upcast(b, send, scratch)
    partials = scratch.arrays(len(layout.domains), send.count * dtype.itemsize)
    own = Span(partials[layout.domain], send.count)
    yield DomainStep(ALLREDUCE, in_domain(layout, dtype, op, sends=[source], receives=[own]))
    served = [rank for domain in layout.other_domains for rank in layout.served(domain)]
    partners = {domain: layout.partner(layout.rank, domain) for domain in layout.other_domains}
    arriving = [(rank, Span(partials[domain], send.count)) for domain, rank in partners.items()]
    yield NetworkStep.of(dtype, [(rank, own) for rank in served], arriving)
    yield _combine_partials(b, dtype, op, partials, output)


def allreduce_in_two_steps(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """Reduce-scatter in each domain, then along each rail; all-gather along each rail, then in the domain.

    Each rail has a shard, so all network cards carry the same bytes, twice their part of the data. On each rail every
    rank reduces a part of the shard. So each two ranks of a rail exchange two messages, which suits large data.
    """
    output = b.receives[0]
    dtype, op, source = yield from _upcast(b, b.sends[0], scratch)
    number, index, domains, rail = layout.domain, layout.index, len(layout.domains), layout.rail_peers()
    results = rail_shards(output, layout, b.dtype)
    shards = split_like(source, results, dtype)
    shard = scratch.span(shards[index].count, dtype)
    yield _reduce_scatter_in_domain(layout, dtype, op, shards, shard)
    places = split(results[index], domains, b.dtype.itemsize)
    parts = split_like(shard, places, dtype)
    count = parts[number].count
    slots = scratch.arrays(domains, count * dtype.itemsize)
    arriving = [(rank, Span(slots[domain], count)) for domain, rank in rail.items()]
    yield NetworkStep.of(dtype, [(rank, parts[domain]) for domain, rank in rail.items()], arriving)
    yield Pack.of([parts[number]], slots[number], dtype)
    yield _combine_partials(b, dtype, op, slots, places[number])
    arriving = [(rank, places[domain]) for domain, rank in rail.items()]
    yield NetworkStep.of(b.dtype, [(rank, places[number]) for rank in rail.values()], arriving)
    yield allgather_in_domain(layout, b.dtype, results[index], results)


def reduce(b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """Reduce-scatter in each domain; each rail sends its shards to the root's domain, which gathers the results."""
    dtype, op, source = yield from _upcast(b, b.sends[0], scratch)
    home, rail = layout.domain_of(b.root), layout.rail_peers()
    at_home = layout.domain == home
    shards = split_like(source, rail_shards(b.sends[0], layout, b.dtype), dtype)
    count = shards[layout.index].count
    slots = scratch.arrays(len(layout.domains) if at_home else 1, count * dtype.itemsize)
    own = Span(slots[layout.domain if at_home else 0], count)
    yield _reduce_scatter_in_domain(layout, dtype, op, shards, own)
    if not at_home:
        yield NetworkStep.of(dtype, [(rail[home], own)] if rail else [])
        return
    yield NetworkStep.of(dtype, receives=[(rank, Span(slots[domain], count)) for domain, rank in rail.items()])
    result = scratch.span(count, b.dtype)
    yield _combine_partials(b, dtype, op, slots, result)
    blocks = rail_shards(b.receives[0], layout, b.dtype) if b.rank == b.root else []
    root = layout.index_of(b.root)
    yield DomainStep(GATHERV, in_domain(layout, b.dtype, root=root, sends=[result], receives=blocks))


def reduce_scatter(
    b: Buffers, layout: DomainLayout, distances: Sequence[int], scratch: ScratchAllocator
) -> Iterator[Step]:
    """Reduce the blocks of the domains that lie ``distances`` domains ahead in this domain, and send them the results.

    The partner of a block's owner reduces the block. The ranks reduce the blocks of one domain where they are, unless
    they have to be cast. If a rank reduces blocks of several domains, these are not contiguous. So each rank first
    packs them in scratch memory. Distance 0 is the domain itself, and comes last: then all partial results of this
    rank's block have arrived, and the rank reduces them.

    The calls with all distances must have the same scratch memory, which holds the partial results.
    """
    blocks, exchanged = b.sends, [distance for distance in distances if distance]
    dtype, op = _accumulation(b.dtype, b.op)
    result = b.receives[0]
    slots = scratch.arrays(len(layout.domains), result.count * dtype.itemsize)
    served = [layout.served(domain) for domain in layout.other_domains]
    start = scratch.take(sum(blocks[rank].count for row in served for rank in row) * dtype.itemsize)
    partials, spans = pack_rows(blocks, served, start, dtype)
    partials[b.rank] = Span(slots[layout.domain], result.count)
    targets = [layout.ahead(distance) for distance in distances]
    if len(targets) == 1 and dtype == b.dtype:
        for ranks in layout.rounds(targets[0]):
            output = partials[ranks[layout.index]] if layout.index < len(ranks) else Span(0, 0)
            yield _reduce_scatter_in_domain(layout, dtype, op, blocks_of_round(blocks, ranks, layout), output)
    else:
        rows = layout.served_by_each(targets)
        count = sum(blocks[rank].count for row in rows for rank in row)
        packed = scratch.span(count, b.dtype)
        _, inputs = pack_rows(blocks, rows, packed.pointer, b.dtype)
        yield Pack.of((blocks[rank] for row in rows for rank in row), packed.pointer, b.dtype)
        if dtype != b.dtype:
            wide = scratch.span(count, dtype)
            yield _cast(b, packed, wide, dtype)
            inputs = split_like(wide, inputs, dtype)
        first = spans[distances[0] - 1] if exchanged else partials[b.rank]
        output = Span(first.pointer, inputs[layout.index].count)
        yield _reduce_scatter_in_domain(layout, dtype, op, inputs, output)
    sources = [layout.ahead(-distance) for distance in exchanged]
    arriving = [(layout.partner(b.rank, domain), Span(slots[domain], result.count)) for domain in sources]
    leaving = [(rank, partials[rank]) for distance in exchanged for rank in served[distance - 1]]
    yield NetworkStep.of(dtype, leaving, arriving)
    if 0 in distances:
        yield _combine_partials(b, dtype, op, slots, result)


def scan(inclusive: bool, b: Buffers, layout: DomainLayout, scratch: ScratchAllocator) -> Iterator[Step]:
    """All-gather the data; each rank reduces the data of the ranks before it, and its own if ``inclusive``.

    Otherwise the first rank writes nothing.
    """
    ranks, send, output = b.rank + inclusive, b.sends[0], b.receives[0]
    slots = scratch.arrays(layout.size, send.count * b.dtype.itemsize)
    gathered = replace(b, receives=[Span(slots[rank], send.count) for rank in range(layout.size)], op="")
    yield from allgather(gathered, layout, [0], scratch)
    yield from allgather(gathered, layout, range(1, len(layout.domains)), scratch)
    if ranks == 1:  # a single contribution is the result, even if the operation would change it
        yield Pack.of([Span(slots[0], send.count)], output.pointer, b.dtype)
    elif ranks:
        divisor = ranks if b.op == "avg" else 1
        op = "sum" if b.op == "avg" else b.op
        yield Combine(op, b.dtype, slots[:ranks], send.count, output.pointer, b.dtype, divisor)


def combine(op: str, parts: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any], divisor: int = 1) -> None:
    """Carry out a `Combine` on arrays of the host. Local."""
    wide = _WIDE if is_narrow(parts[0].dtype) or is_narrow(out.dtype) else parts[0].dtype
    total = out if out.dtype == wide else np.empty(out.size, wide)
    Reducer(op, wide).reduce([part.astype(wide, copy=False) for part in parts], total)
    if divisor != 1:
        np.divide(total, wide.type(divisor), out=total)
    if total is not out:
        np.copyto(out, total, casting="unsafe")


def reduce_on_host(op: str, domains: Sequence[Sequence[npt.NDArray[Any]]], out: npt.NDArray[Any]) -> None:
    """Reduce the contributions of the ranks of each domain, bitwise as the schedules do. Local."""
    dtype, partial_op = _accumulation(out.dtype, op)
    partials = [np.empty(out.size, dtype) for _ in domains]
    for parts, partial in zip(domains, partials, strict=True):
        combine(partial_op, parts, partial)
    combine(partial_op, partials, out, sum(map(len, domains)) if op == "avg" else 1)


def _accumulation(dtype: np.dtype[Any], op: str) -> tuple[np.dtype[Any], str]:
    """Return the type of partial results, and the operation that reduces them."""
    wide = is_narrow(dtype) and op not in _EXACT
    return (_WIDE if wide else dtype), ("sum" if op == "avg" else op)


def _upcast(
    b: Buffers, send: Span, scratch: ScratchAllocator
) -> Generator[Step, None, tuple[np.dtype[Any], str, Span]]:
    """Cast the input if partial results have a wider type; return that type, the operation, the input."""
    dtype, op = _accumulation(b.dtype, b.op)
    if dtype == b.dtype:
        return dtype, op, send
    wide = scratch.span(send.count, dtype)
    yield _cast(b, send, wide, dtype)
    return dtype, op, wide


def _cast(b: Buffers, source: Span, target: Span, dtype: np.dtype[Any]) -> Combine:
    one = range(source.pointer, source.pointer + 1, ALIGNED_NBYTES)
    return Combine("sum", b.dtype, one, source.count, target.pointer, dtype)


def _combine_partials(b: Buffers, dtype: np.dtype[Any], op: str, slots: range, output: Span) -> Combine:
    return Combine(op, dtype, slots, output.count, output.pointer, b.dtype, b.size if b.op == "avg" else 1)


def _reduce_scatter_in_domain(
    layout: DomainLayout, dtype: np.dtype[Any], op: str, blocks: Sequence[Span], output: Span
) -> DomainStep:
    """Reduce block i of all ranks of the domain on the rank with index i."""
    operation = REDUCE_SCATTER_BLOCK if len({block.count for block in blocks}) == 1 else REDUCE_SCATTER
    return DomainStep(operation, in_domain(layout, dtype, op, sends=blocks, receives=[output]))
