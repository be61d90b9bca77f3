"""Collectives that move data, carried out by the simulator of exchanges."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns
from tests.helpers.references.exchange_simulator import (
    DTYPE,
    ITEMSIZE,
    LONG_COUNTS,
    PIECES,
    SIZES,
    Memory,
    counts_of,
    everywhere,
    ranks,
)


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
