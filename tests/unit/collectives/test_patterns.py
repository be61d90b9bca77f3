"""Patterns, carried out by the simulator of exchanges, which tells every order of a reduction from every other.

test_packed.py carries out the collectives that move data in one shot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.collectives.patterns import Buffers
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.references.exchange_simulator import DTYPE, ITEMSIZE, Memory, fold, run


@given(count=st.integers(0, 10**7), size=st.integers(1, 8), itemsize=st.sampled_from([1, 2, 4, 8, 16, 200]))
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


ROWS = [
    *(("Bcast", "one_shot"), ("Bcast", "two_shot"), ("Scan", "one_shot"), ("Exscan", "one_shot")),
    *(("Allreduce", "one_shot"), ("Allreduce", "two_shot"), ("Allreduce", "ring")),
    *(("Reduce", "one_shot"), ("Reduce", "two_shot")),
    *(("Reduce_scatter_block", "one_shot"), ("Reduce_scatter", "one_shot")),
]


@pytest.mark.parametrize(("name", "algorithm"), ROWS)
@given(draw=st.randoms(use_true_random=False, note_method_calls=True))
def test_every_rank_ends_with_its_result_and_nothing_else(name: str, algorithm: str, draw: Random) -> None:
    row = OPERATIONS[name]
    size = draw.randint(1 + (algorithm == "two_shot"), 8)
    root, in_place = draw.randrange(size), draw.choice([False, True]) and row.reduces
    count, line = draw.randint(0, draw.choice([9, 9, 40, 400])), 128 // ITEMSIZE  # long shards are whole lines
    if algorithm == "ring":
        edges = [*range(2), *(number + more for number in (size, size * line) for more in (-1, 0, 1))]
        count = draw.choice([*edges, 400])
    counts = [draw.randint(0, 9) for _ in range(size)] if row.send == "counted" else [count] * size
    displs = [sum(counts[:rank]) for rank in range(size)]
    has_blocks, total = row.receive == "one" != row.send, sum(counts) if row.send != "one" else count
    piece_nbytes = draw.choice([None, 1, 4, 40, 128, 500, 10**6]) if algorithm == "two_shot" else None
    memories = [Memory(rank) for rank in range(size)]
    for memory in memories if (name, algorithm) == ("Reduce", "two_shot") else ():
        memory.cells += ["nowhere"] * count  # results that are not stored have address 0
        memory.ignore(Span(0, count))
    sends = [memory.buffer(total, "in") for memory in memories]
    values = [memory.read(send) for memory, send in zip(memories, sends, strict=True)]
    parts = []
    for rank, memory in enumerate(memories):
        send, blocks, scratch, output = sends[rank], None, None, sends[rank]
        if has_blocks:
            blocks, output = patterns.blocks(send.pointer, counts, displs, ITEMSIZE), Span(send.pointer, counts[rank])
        if row.reduces and not in_place:
            output = memory.buffer(counts[rank], "out")
        elif has_blocks:
            scratch = memory.buffer(counts[rank], "scratch")
            memory.ignore(scratch)
        gets = row.rooted != "receive" or rank == root
        for span, result in results(name, algorithm, values, output, rank, root) if gets else ():
            memory.expect(span, result[displs[rank] :][: span.count] if has_blocks else result)
        buffers = Buffers(
            rank,
            size,
            DTYPE,
            send=send if row.reduces and not has_blocks else None,
            send_blocks=blocks,
            output=output if gets else None,
            op="sum" * row.reduces,
            root=root,
            scratch=0 if scratch is None else scratch.pointer,
        )
        parts.append(Pattern(row, buffers, algorithm, piece_nbytes))
    run(memories, parts)
    if algorithm == "ring" and size > 1:
        require_ring(parts, count)
    if name == "Bcast":  # with two shots the root sends everything once
        sent = sum(span.count for exchange in parts[root] for span in exchange.sends if span)
        assert sent == count * (1 if algorithm == "two_shot" else size - 1)


def results(
    name: str, algorithm: str, values: list[list[str]], output: Span, rank: int, root: int
) -> Iterator[tuple[Span, list[str]]]:
    """Yield the spans of the output of a rank, with what they hold in the end."""
    size = len(values)
    if algorithm == "ring":
        for index, shard in enumerate(patterns.split(output, size, ITEMSIZE)):
            start = (shard.pointer - output.pointer) // ITEMSIZE
            order = [(index + step) % size for step in range(1, size + 1)]
            yield shard, fold([values[each][start : start + shard.count] for each in order])
    elif name == "Bcast":
        yield output, values[root]
    elif name == "Scan":
        yield output, fold(values[: rank + 1])
    elif name != "Exscan":
        yield output, fold(values)
    elif rank:
        yield output, fold(values[:rank])


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


def test_simulator_finds_faults() -> None:
    """The tests of patterns can fail: the simulator finds exchanges that are wrong."""
    memories = [Memory(0), Memory(1)]
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
