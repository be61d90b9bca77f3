"""Exchanges carried out on memory whose elements tell their origin, and checked against the rules of exchange.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.mpi.arguments import Span

DTYPE = np.dtype(np.float32)
ITEMSIZE = DTYPE.itemsize


@dataclass
class Memory:
    """One rank's memory, an element per cell; cell i is at address i * ITEMSIZE."""

    rank: int
    cells: list[str] = field(default_factory=list)
    expected: dict[int, str] = field(default_factory=dict)
    ignored: set[int] = field(default_factory=set)

    def buffer(self, count: int, name: str) -> Span:
        """A new buffer, with cells before and after it that no rank may touch."""
        self.cells.append("guard")
        start = len(self.cells)
        self.cells += [f"{name}{index}@{self.rank}" for index in range(count)] + ["guard"]
        return Span(start * ITEMSIZE, count)

    def read(self, span: Span) -> list[str]:
        return self.cells[_cells(span)]

    def expect(self, span: Span, values: Sequence[str]) -> None:
        """The right content of a span at the end; all other memory has to stay as it is."""
        assert len(values) == span.count
        self.expected.update(enumerate(values, _cells(span).start))

    def ignore(self, span: Span) -> None:
        """A span may have any content at the end."""
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


def run(memories: list[Memory], steps: Sequence[Sequence[Exchange]]) -> None:
    """Carry out every rank's list, and check it against the promises of exchange.py."""
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
            if exchange.move:
                source_span, target = exchange.move
                memory.cells[_cells(target)] = memory.read(source_span)
    for memory, cells in zip(memories, before, strict=True):
        memory.require_expected(cells)


def require_contract(rank: int, exchange: Exchange) -> None:
    reduction = exchange.reduction
    written = [(peer, span) for peer, span in enumerate(exchange.receives) if span and span.count]
    if reduction:
        assert all(exchange.receives[source] is None for source in reduction.sources)
        assert (reduction.own is not None) == (rank in reduction.sources)
        written.append((-1, reduction.output))
    cells = [cell for _, span in written for cell in range(_cells(span).start, _cells(span).stop)]
    assert len(cells) == len(set(cells)), "two things are written to one place"
    for peer, target in written:
        for receiver, source in enumerate(exchange.sends):
            if source is None or source == target or not overlap(source, target):
                continue
            # Only a rank's own move goes downwards.
            assert peer == receiver == rank and target.pointer < source.pointer
        if reduction and reduction.own and peer == -1:
            assert reduction.own == target or not overlap(reduction.own, target)


def overlap(a: Span, b: Span) -> bool:
    return bool(set(range(_cells(a).start, _cells(a).stop)) & set(range(_cells(b).start, _cells(b).stop)))
