"""Patterns, carried out by the simulator of exchanges, which tells every order of a reduction from every other.

test_packed.py carries out the collectives that move data in one shot.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.collectives.exchange import Exchange
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.exchange_simulator import (
    COUNTS,
    DTYPE,
    ITEMSIZE,
    LONG_COUNTS,
    PIECES,
    SIZES,
    Memory,
    counts_of,
    everywhere,
    fold,
    ranks,
    run,
)


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


def test_shards_of_a_long_span_begin_at_cache_lines_and_are_balanced() -> None:
    shards = patterns.split(Span(0, 1_000_003), 3, 4)
    assert all(shard.pointer % 128 == 0 for shard in shards)
    assert max(shard.count for shard in shards) - min(shard.count for shard in shards) < 3 * 32


def test_a_missing_buffer_is_an_error() -> None:
    with pytest.raises(InvalidUsageError):
        _ = patterns.gather(0, 2, DTYPE, Span(0, 1), None, 0).steps
    with pytest.raises(InvalidUsageError):
        _ = patterns.reduce(0, 2, DTYPE, Span(0, 1), None, "sum", 0).steps


def told(size: int, count: int, data: st.DataObject) -> tuple[list[Memory], list[Span], int]:
    """Return the memories and buffers of ranks that expect the content of a root's buffer, and that content."""
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    buffers = [memory.buffer(count, "x") for memory in memories]
    for memory, buffer in zip(memories, buffers, strict=True):
        memory.expect(buffer, memories[root].read(buffers[root]))
    return memories, buffers, root


@given(size=st.integers(2, 8), count=LONG_COUNTS, piece_nbytes=st.none() | PIECES, data=st.data())
def test_bcast(size: int, count: int, piece_nbytes: int | None, data: st.DataObject) -> None:
    memories, buffers, root = told(size, count, data)
    everywhere(
        memories,
        lambda rank, size: patterns.bcast(rank, size, DTYPE, buffers[rank], root, piece_nbytes=piece_nbytes),
    )


@given(size=st.integers(2, 8), count=LONG_COUNTS, data=st.data())
def test_two_shot_bcast(size: int, count: int, data: st.DataObject) -> None:
    memories, buffers, root = told(size, count, data)
    everywhere(memories, lambda rank, size: patterns.bcast(rank, size, DTYPE, buffers[rank], root, "two_shot"))
    (first, _) = patterns.bcast(root, size, DTYPE, buffers[root], root, "two_shot")
    assert sum(span.count for span in first.sends if span) == count  # the root sends everything once


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


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_ring_allreduce(size: int, in_place: bool) -> None:
    line = 128 // ITEMSIZE  # shards of more are whole lines
    for count in {0, 1, size - 1, size, size + 1, size * line - 1, size * line, size * line + 1, 400}:
        memories = ranks(size)
        sends = [memory.buffer(count, "in") for memory in memories]
        outputs = sends if in_place else [memory.buffer(count, "out") for memory in memories]
        for output in outputs:
            for index, shard in enumerate(patterns.split(output, size, ITEMSIZE)):
                start = (shard.pointer - output.pointer) // ITEMSIZE
                order = [(index + step) % size for step in range(1, size + 1)]
                result = fold([memories[rank].read(sends[rank])[start : start + shard.count] for rank in order])
                for memory in memories:
                    memory.expect(shard, result)
        steps = [patterns.ring_allreduce(rank, size, DTYPE, sends[rank], outputs[rank], "sum") for rank in range(size)]
        run(memories, steps)
        if size > 1:
            require_ring(steps, count)


def require_ring(steps: Sequence[Sequence[Exchange]], count: int) -> None:
    """Each rank sends only to the next one, and all together send the least that an all-reduce can."""
    size = len(steps)
    assert {len(exchanges) for exchanges in steps} == {2 * (size - 1)}
    total = 0
    for rank, exchanges in enumerate(steps):
        for exchange in exchanges:
            assert [peer for peer, span in enumerate(exchange.sends) if span] == [(rank + 1) % size]
            total += sum(span.count for span in exchange.sends if span)
    assert total == 2 * (size - 1) * count


@given(size=SIZES, count=LONG_COUNTS, in_place=st.booleans(), data=st.data())
def test_reduce(size: int, count: int, in_place: bool, data: st.DataObject) -> None:
    root = data.draw(st.integers(0, size - 1))
    memories = ranks(size)
    sends = [memory.buffer(count, "in") for memory in memories]
    output = sends[root] if in_place else memories[root].buffer(count, "out")
    memories[root].expect(output, fold([memory.read(send) for memory, send in zip(memories, sends, strict=True)]))
    everywhere(
        memories,
        lambda rank, size: patterns.reduce(
            rank, size, DTYPE, sends[rank], output if rank == root else None, "sum", root
        ),
    )


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
            rank, size, DTYPE, blocks[rank], outputs[rank], "sum", scratch=scratches[rank].pointer if in_place else 0
        ),
    )


@given(size=st.integers(2, 8), count=LONG_COUNTS, in_place=st.booleans(), data=st.data())
def test_two_shot_reduce(size: int, count: int, in_place: bool, data: st.DataObject) -> None:
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
        lambda rank, size: patterns.reduce(
            rank, size, DTYPE, sends[rank], output if rank == root else None, "sum", root, "two_shot"
        ),
    )


@pytest.mark.parametrize("inclusive", [True, False], ids=["scan", "exscan"])
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


def test_simulator_finds_faults() -> None:
    """The tests of patterns can fail: the simulator finds exchanges that are wrong."""
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
        run(memories, [[sends], [Exchange(DTYPE, (None, None), (buffers[1], None))]])  # no rank expects x0@0 there
