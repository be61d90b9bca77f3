"""Every collective's exchanges, carried out by a simulator on memory whose elements say how they came about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.collectives import patterns
from mpicomm.collectives.exchange import Exchange, Span
from mpicomm.errors import InvalidUsageError

DTYPE = np.dtype(np.float32)
ITEMSIZE = DTYPE.itemsize
SIZES = st.integers(1, 8)
COUNTS = st.integers(0, 9)
LONG_COUNTS = st.integers(0, 400)
UNHURRIED = settings(deadline=None)  # how long an example takes is the machine's affair
PIECES = st.sampled_from([1, 4, 40, 128, 500, 10**6])


@dataclass
class Memory:
    """One rank's memory, an element per cell; cell i is at address i * ITEMSIZE."""

    rank: int
    cells: list[str] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    ignored: set[int] = field(default_factory=set)

    def buffer(self, count: int, name: str) -> Span:
        """A new buffer, with cells before and after that nobody may touch."""
        self.cells.append("guard")
        start = len(self.cells)
        self.cells += [f"{name}{index}@{self.rank}" for index in range(count)] + ["guard"]
        return Span(start * ITEMSIZE, count)

    def read(self, span: Span) -> list[str]:
        return self.cells[_cells(span)]

    def expect(self, span: Span, values: Sequence[str]) -> None:
        """What is to be in a span when everything is over; everything else is to stay as it is now."""
        assert len(values) == span.count
        self.expected.update(enumerate(values, _cells(span).start))

    def ignore(self, span: Span) -> None:
        """Anything may be in a span when everything is over."""
        self.ignored.update(range(_cells(span).start, _cells(span).stop))

    def require_expected(self, before: list[str]) -> None:
        for index, (now, old) in enumerate(zip(self.cells, before, strict=True)):
            assert index in self.ignored or now == self.expected.get(index, old)


def _cells(span: Span) -> slice:
    assert span.pointer % ITEMSIZE == 0
    return slice(span.pointer // ITEMSIZE, span.pointer // ITEMSIZE + span.count)


def fold(parts: Sequence[Sequence[str]]) -> list[str]:
    """Reduce symbols with an operation that tells every order and grouping from every other."""
    result = list(parts[0])
    for part in parts[1:]:
        result = [f"({a}*{b})" for a, b in zip(result, part, strict=True)]
    return result


def run(memories: list[Memory], steps: list[list[Exchange]]) -> None:
    """Carry out every rank's list, and check it against what exchange.py promises."""
    before = [list(memory.cells) for memory in memories]
    assert len({len(each) for each in steps}) == 1, "ranks have different numbers of exchanges"
    for exchanges in zip(*steps, strict=True):
        for rank, exchange in enumerate(exchanges):
            require_contract(rank, exchange)
        sent = [
            [None if not span or not span.count else memory.read(span) for span in exchange.sends]
            for memory, exchange in zip(memories, exchanges, strict=True)
        ]
        owns = [
            memory.read(exchange.reduction.own) if exchange.reduction and exchange.reduction.own else None
            for memory, exchange in zip(memories, exchanges, strict=True)
        ]
        for rank, (memory, exchange) in enumerate(zip(memories, exchanges, strict=True)):
            reduction = exchange.reduction
            arrived: list[list[str]] = []
            for peer, span in enumerate(exchange.receives):
                data = sent[peer][rank]
                if reduction and peer in reduction.sources:
                    continue
                if not span or not span.count:
                    assert data is None, f"rank {peer} sends what rank {rank} does not receive"
                else:
                    assert data is not None, f"rank {rank} receives what rank {peer} does not send"
                    assert len(data) == span.count
                    memory.cells[_cells(span)] = data
            if reduction and reduction.output.count:
                for source in reduction.sources:
                    data = owns[rank] if source == rank else sent[source][rank]
                    assert data is not None and len(data) == reduction.output.count
                    arrived.append(data)
                memory.cells[_cells(reduction.output)] = fold(arrived)
    for memory, cells in zip(memories, before, strict=True):
        memory.require_expected(cells)


def require_contract(rank: int, exchange: Exchange) -> None:
    reduction = exchange.reduction
    written = [(peer, span) for peer, span in enumerate(exchange.receives) if span and span.count]
    if reduction:
        assert all(exchange.receives[source] is None for source in reduction.sources)
        assert (reduction.own is not None) == (rank in reduction.sources)
        assert list(reduction.sources) == sorted(reduction.sources), "sources are not in rank order"
        written.append((-1, reduction.output))
    cells = [cell for _, span in written for cell in range(_cells(span).start, _cells(span).stop)]
    assert len(cells) == len(set(cells)), "two things are written to one place"
    for peer, target in written:
        for receiver, source in enumerate(exchange.sends):
            if source is None or source == target or not overlap(source, target):
                continue
            # A rank's own move alone, downwards.
            assert peer == receiver == rank and target.pointer < source.pointer
        if reduction and reduction.own and peer == -1:
            assert reduction.own == target or not overlap(reduction.own, target)


def overlap(a: Span, b: Span) -> bool:
    return bool(set(range(_cells(a).start, _cells(a).stop)) & set(range(_cells(b).start, _cells(b).stop)))


def ranks(size: int) -> list[Memory]:
    return [Memory(rank) for rank in range(size)]


def everywhere(memories: list[Memory], pattern: Callable[[int, int], list[Exchange]]) -> None:
    run(memories, [pattern(memory.rank, len(memories)) for memory in memories])


@dataclass
class Layout:
    """Blocks of any counts in a buffer: in any order, with gaps."""

    counts: list[int]
    displs: list[int]
    extent: int

    def spans(self, buffer: Span) -> list[Span]:
        return patterns.blocks(buffer.pointer, self.counts, self.displs, ITEMSIZE)


@st.composite
def layouts(draw: st.DrawFn, counts: list[int]) -> Layout:
    displs = [0] * len(counts)
    position = 0
    for index in draw(st.permutations(range(len(counts)))):
        position += draw(st.integers(0, 2))
        displs[index] = position
        position += counts[index]
    return Layout(counts, displs, position)


def counts_of(data: st.DataObject, size: int) -> list[int]:
    return data.draw(st.lists(COUNTS, min_size=size, max_size=size))


@UNHURRIED
@given(size=SIZES, count=LONG_COUNTS, in_place=st.booleans(), piece_nbytes=st.none() | PIECES)
def test_allreduce(size: int, count: int, in_place: bool, piece_nbytes: int | None) -> None:
    memories = ranks(size)
    sends = [memory.buffer(count, "in") for memory in memories]
    outputs = sends if in_place else [memory.buffer(count, "out") for memory in memories]
    result = fold([memory.read(send) for memory, send in zip(memories, sends, strict=True)])
    for memory, output in zip(memories, outputs, strict=True):
        memory.expect(output, result)
    everywhere(
        memories,
        lambda rank, size: patterns.allreduce(
            rank, size, DTYPE, sends[rank], outputs[rank], "sum", piece_nbytes=piece_nbytes
        ),
    )


@UNHURRIED
@given(size=SIZES, count=LONG_COUNTS, in_place=st.booleans(), piece_nbytes=st.none() | PIECES, data=st.data())
def test_reduce(size: int, count: int, in_place: bool, piece_nbytes: int | None, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    sends = [memory.buffer(count, "in") for memory in memories]
    output = sends[root] if in_place else memories[root].buffer(count, "out")
    scratch_count = patterns.reduce_scratch_count(count, size, DTYPE, piece_nbytes) if piece_nbytes else 0
    scratches = [memory.buffer(scratch_count, "scratch") for memory in memories]
    memories[root].expect(output, fold([memory.read(send) for memory, send in zip(memories, sends, strict=True)]))
    steps = [
        patterns.reduce(
            rank,
            size,
            DTYPE,
            sends[rank],
            output if rank == root else None,
            "sum",
            root,
            scratch=None if rank == root else scratches[rank],
            piece_nbytes=piece_nbytes,
        )
        for rank in range(size)
    ]
    for memory, scratch in zip(memories, scratches, strict=True):
        memory.ignore(scratch)
    run(memories, steps)


@UNHURRIED
@given(size=SIZES, in_place=st.booleans(), equal=st.booleans(), data=st.data())
def test_reduce_scatter(size: int, in_place: bool, equal: bool, data: st.DataObject) -> None:
    counts = [data.draw(COUNTS)] * size if equal else counts_of(data, size)
    displs = [sum(counts[:rank]) for rank in range(size)]
    memories = ranks(size)
    sends = [memory.buffer(sum(counts), "in") for memory in memories]
    whole = fold([memory.read(send) for memory, send in zip(memories, sends, strict=True)])
    outputs = [
        Span(sends[rank].pointer, counts[rank]) if in_place else memories[rank].buffer(counts[rank], "out")
        for rank in range(size)
    ]
    blocks = [patterns.blocks(send.pointer, counts, displs, ITEMSIZE) for send in sends]
    scratches = [memory.buffer(counts[rank], "scratch") for rank, memory in enumerate(memories)]
    for rank, memory in enumerate(memories):
        memory.expect(outputs[rank], whole[displs[rank] : displs[rank] + counts[rank]])
        memory.ignore(scratches[rank])
    everywhere(
        memories,
        lambda rank, size: patterns.reduce_scatter(
            rank, size, DTYPE, blocks[rank], outputs[rank], "sum", scratch=scratches[rank]
        ),
    )


@UNHURRIED
@given(size=SIZES, in_place=st.booleans(), data=st.data())
def test_allgather(size: int, in_place: bool, data: st.DataObject) -> None:
    counts = counts_of(data, size)
    memories = ranks(size)
    places = [data.draw(layouts(counts)) for _ in memories]
    blocks = [place.spans(memory.buffer(place.extent, "out")) for memory, place in zip(memories, places, strict=True)]
    sends = [blocks[rank][rank] if in_place else memories[rank].buffer(counts[rank], "in") for rank in range(size)]
    values = [memory.read(send) for memory, send in zip(memories, sends, strict=True)]
    for rank, memory in enumerate(memories):
        for block, value in zip(blocks[rank], values, strict=True):
            memory.expect(block, value)
    everywhere(memories, lambda rank, size: patterns.allgather(rank, size, DTYPE, sends[rank], blocks[rank]))


@UNHURRIED
@given(size=SIZES, in_place=st.booleans(), data=st.data())
def test_gather(size: int, in_place: bool, data: st.DataObject) -> None:
    counts, root = counts_of(data, size), data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    place = data.draw(layouts(counts))
    blocks = place.spans(memories[root].buffer(place.extent, "out"))
    sends = [
        blocks[root] if in_place and rank == root else memories[rank].buffer(counts[rank], "in") for rank in range(size)
    ]
    for rank, memory in enumerate(memories):
        memories[root].expect(blocks[rank], memory.read(sends[rank]))
    everywhere(
        memories,
        lambda rank, size: patterns.gather(rank, size, DTYPE, sends[rank], blocks if rank == root else None, root),
    )


@UNHURRIED
@given(size=SIZES, in_place=st.booleans(), data=st.data())
def test_scatter(size: int, in_place: bool, data: st.DataObject) -> None:
    counts, root = counts_of(data, size), data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    place = data.draw(layouts(counts))
    blocks = place.spans(memories[root].buffer(place.extent, "in"))
    outputs = [
        blocks[root] if in_place and rank == root else memories[rank].buffer(counts[rank], "out")
        for rank in range(size)
    ]
    for rank, memory in enumerate(memories):
        memory.expect(outputs[rank], memories[root].read(blocks[rank]))
    everywhere(
        memories,
        lambda rank, size: patterns.scatter(rank, size, DTYPE, blocks if rank == root else None, outputs[rank], root),
    )


@UNHURRIED
@given(size=SIZES, in_place=st.booleans(), data=st.data())
def test_alltoall(size: int, in_place: bool, data: st.DataObject) -> None:
    table = [counts_of(data, size) for _ in range(size)]
    if in_place:  # MPI has one count for both directions then
        table = [[table[min(a, b)][max(a, b)] for b in range(size)] for a in range(size)]
    memories = ranks(size)
    incoming = [[table[peer][rank] for peer in range(size)] for rank in range(size)]
    places = [data.draw(layouts(counts)) for counts in incoming]
    blocks = [place.spans(memory.buffer(place.extent, "out")) for memory, place in zip(memories, places, strict=True)]
    sends = blocks
    if not in_place:
        send_places = [data.draw(layouts(counts)) for counts in table]
        sends = [
            place.spans(memory.buffer(place.extent, "in")) for memory, place in zip(memories, send_places, strict=True)
        ]
    for rank, memory in enumerate(memories):
        for peer in range(size):
            memory.expect(blocks[rank][peer], memories[peer].read(sends[peer][rank]))
    everywhere(memories, lambda rank, size: patterns.alltoall(rank, size, DTYPE, sends[rank], blocks[rank]))


@UNHURRIED
@given(size=SIZES, count=LONG_COUNTS, piece_nbytes=st.none() | PIECES, data=st.data())
def test_bcast(size: int, count: int, piece_nbytes: int | None, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    buffers = [memory.buffer(count, "x") for memory in memories]
    for memory, buffer in zip(memories, buffers, strict=True):
        memory.expect(buffer, memories[root].read(buffers[root]))
    everywhere(
        memories,
        lambda rank, size: patterns.bcast(rank, size, DTYPE, buffers[rank], root, piece_nbytes=piece_nbytes),
    )


@UNHURRIED
@given(size=st.integers(2, 8), count=LONG_COUNTS, data=st.data())
def test_relayed_bcast(size: int, count: int, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    buffers = [memory.buffer(count, "x") for memory in memories]
    for memory, buffer in zip(memories, buffers, strict=True):
        memory.expect(buffer, memories[root].read(buffers[root]))
    everywhere(memories, lambda rank, size: patterns.relayed_bcast(rank, size, DTYPE, buffers[rank], root))
    (first, _) = patterns.relayed_bcast(root, size, DTYPE, buffers[root], root)
    assert sum(span.count for span in first.sends if span) == count  # the root sends everything once


@UNHURRIED
@given(size=st.integers(2, 8), count=LONG_COUNTS, in_place=st.booleans(), data=st.data())
def test_relayed_reduce(size: int, count: int, in_place: bool, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    for memory in memories:
        memory.cells += ["nowhere"] * count  # results that are not stored have address 0
        memory.ignore(Span(0, count))
    sends = [memory.buffer(count, "in") for memory in memories]
    output = sends[root] if in_place else memories[root].buffer(count, "out")
    memories[root].expect(output, fold([memory.read(send) for memory, send in zip(memories, sends, strict=True)]))
    everywhere(
        memories,
        lambda rank, size: patterns.relayed_reduce(
            rank, size, DTYPE, sends[rank], output if rank == root else None, "sum", root
        ),
    )


@pytest.mark.parametrize("inclusive", [True, False], ids=["scan", "exscan"])
@UNHURRIED
@given(size=SIZES, count=COUNTS, in_place=st.booleans())
def test_scan(size: int, count: int, in_place: bool, inclusive: bool) -> None:
    memories = ranks(size)
    sends = [memory.buffer(count, "in") for memory in memories]
    outputs = sends if in_place else [memory.buffer(count, "out") for memory in memories]
    values = [memory.read(send) for memory, send in zip(memories, sends, strict=True)]
    for rank, memory in enumerate(memories):
        if inclusive or rank:
            memory.expect(outputs[rank], fold(values[: rank + 1 if inclusive else rank]))
    pattern = patterns.scan if inclusive else patterns.exscan
    everywhere(memories, lambda rank, size: pattern(rank, size, DTYPE, sends[rank], outputs[rank], "sum"))


@UNHURRIED
@given(count=st.integers(0, 10**7), size=SIZES, itemsize=st.sampled_from([1, 2, 4, 8, 16, 200]))
def test_split_covers_a_span_in_order(count: int, size: int, itemsize: int) -> None:
    span = Span(4096, count)
    shards = patterns.split(span, size, itemsize)
    assert len(shards) == size
    position = span.pointer
    for shard in shards:
        assert shard.pointer == position and shard.count <= shards[0].count
        position += shard.count * itemsize
    assert sum(shard.count for shard in shards) == count
    assert patterns.split(Span(0, count), size, itemsize) == [Span(s.pointer - 4096, s.count) for s in shards]


def test_shards_of_a_long_span_begin_at_cache_lines_and_are_balanced() -> None:
    shards = patterns.split(Span(0, 1_000_003), 3, 4)
    assert all(shard.pointer % 128 == 0 for shard in shards)
    assert max(shard.count for shard in shards) - min(shard.count for shard in shards) < 3 * 32


def test_a_missing_buffer_is_an_error() -> None:
    with pytest.raises(InvalidUsageError):
        patterns.gather(0, 2, DTYPE, Span(0, 1), None, 0)
    with pytest.raises(InvalidUsageError):
        patterns.reduce(1, 2, DTYPE, Span(0, 1), None, "sum", 0, piece_nbytes=4)


def test_simulator_finds_what_is_wrong() -> None:
    """The tests above can fail: of an exchange that is not what it should be, the simulator says so."""
    memories = ranks(2)
    buffers = [memory.buffer(3, "x") for memory in memories]
    nothing = Exchange(DTYPE, (None, None), (None, None))
    sends = Exchange(DTYPE, (None, buffers[0]), (None, None))
    with pytest.raises(AssertionError, match="does not receive"):
        run(memories, [[sends], [nothing]])
    with pytest.raises(AssertionError, match="does not send"):
        run(memories, [[nothing], [Exchange(DTYPE, (None, None), (buffers[1], None))]])
    with pytest.raises(AssertionError, match="different numbers"):
        run(memories, [[nothing], []])
    with pytest.raises(AssertionError):
        run(memories, [[sends], [Exchange(DTYPE, (None, None), (buffers[1], None))]])  # nobody expects x0@0 there
