"""Collectives with their buffers spelled out, for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import numpy as np

from mpicomm.collectives import operations
from mpicomm.collectives.exchange import Exchange, TwoShot
from mpicomm.collectives.gpu.algorithms.base import Form
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import Buffers, blocks, split
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.arguments import Span

__all__ = ["Pattern", "blocks", "split"]

Spans = Sequence[Span]
Dtype = np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Pattern(Sequence[Exchange]):
    """One rank's part of a collective by an algorithm of that name; as a sequence, its exchanges in order."""

    operation: Operation
    buffers: Buffers
    algorithm: str = "one_shot"

    @cached_property
    def steps(self) -> list[Exchange | TwoShot]:
        """The exchanges of all steps; two shots are one step."""
        operation, buffers = self.operation, self.buffers
        if self.algorithm == "ring":
            assert operation.ring is not None
            return [*operation.ring(buffers)]
        if self.algorithm == "two_shot":
            assert operation.two_shot is not None
            return [operation.two_shot(buffers)]
        return [operation.one_shot(buffers)]

    @property
    def form(self) -> Form:
        """The form of the call."""
        return Form.of_buffers(self.operation, self.buffers)

    @property
    def signature(self) -> Signature:
        """The facts in which ranks must agree."""
        b, operation, count = self.buffers, self.operation, None
        if operation.send == "by_recvcounts":
            count = sum(block.count for block in b.sends)
        elif operation.send == operation.receive == "one":
            count = [*b.receives, *b.sends][0].count
        op, root = b.op if operation.reduces else None, b.root if operation.rooted else None
        return Signature(operation.name, b.dtype.name, count, op, root)

    @cached_property
    def _exchanges(self) -> list[Exchange]:
        return [each for step in self.steps for each in (step if isinstance(step, tuple) else (step,))]

    @overload
    def __getitem__(self, index: int) -> Exchange: ...
    @overload
    def __getitem__(self, index: slice) -> list[Exchange]: ...
    def __getitem__(self, index: int | slice) -> Exchange | list[Exchange]:
        return self._exchanges[index]

    def __len__(self) -> int:
        return len(self._exchanges)


def allreduce(rank: int, size: int, dtype: Dtype, send: Span, output: Span, op: str) -> Pattern:
    return Pattern(operations.ALLREDUCE, Buffers(rank, size, dtype, [send], [output], op))


def reduce(
    rank: int, size: int, dtype: Dtype, send: Span, output: Span | None, op: str, root: int, algorithm: str = "one_shot"
) -> Pattern:
    buffers = Buffers(rank, size, dtype, [send], [] if output is None else [output], op, root)
    return Pattern(operations.REDUCE, buffers, algorithm)


def reduce_scatter(
    rank: int, size: int, dtype: Dtype, blocks: Spans, output: Span, op: str, *, scratch: int = 0
) -> Pattern:
    equal = len({block.count for block in blocks}) == 1
    operation = operations.REDUCE_SCATTER_BLOCK if equal else operations.REDUCE_SCATTER
    return Pattern(operation, Buffers(rank, size, dtype, blocks, [output], op, scratch=scratch))


def allgather(rank: int, size: int, dtype: Dtype, send: Span, blocks: Spans) -> Pattern:
    equal = len({block.count for block in blocks}) == 1
    operation = operations.ALLGATHER if equal else operations.ALLGATHERV
    return Pattern(operation, Buffers(rank, size, dtype, [send], blocks))


def gather(rank: int, size: int, dtype: Dtype, send: Span, blocks: Spans | None, root: int) -> Pattern:
    return Pattern(operations.GATHER, Buffers(rank, size, dtype, [send], blocks or (), root=root))


def alltoall(
    rank: int,
    size: int,
    dtype: Dtype,
    sends: Spans,
    receives: Spans,
    operation: Operation = operations.ALLTOALLV,
    block_hashes: tuple[tuple[int, int], ...] = (),
) -> Pattern:
    return Pattern(operation, Buffers(rank, size, dtype, sends, receives, block_hashes=block_hashes))


def bcast(rank: int, size: int, dtype: Dtype, buffer: Span, root: int, algorithm: str = "one_shot") -> Pattern:
    return Pattern(operations.BCAST, Buffers(rank, size, dtype, (), [buffer], root=root), algorithm)


def scan(rank: int, size: int, dtype: Dtype, send: Span, output: Span, op: str) -> Pattern:
    return Pattern(operations.SCAN, Buffers(rank, size, dtype, [send], [output], op))


def buffers_of(
    operation: Operation,
    rank: int,
    counts: Sequence[int],
    dtype: Dtype,
    send: int,
    receive: int,
    *,
    op: str = "sum",
    root: int = 0,
    in_place: bool = False,
) -> Buffers:
    """Return a rank's buffers of a call, at two addresses. The block of rank r has ``counts[r]`` elements."""
    starts = [sum(counts[:peer]) for peer in range(len(counts))]
    at_root, rooted = rank == root, operation.rooted
    in_place = in_place and (at_root or rooted == "")

    def parts(pointer: int, shape: str) -> list[Span]:
        if shape == "one" and not operation.of_neighbors:
            return [Span(pointer, counts[rank])]
        return blocks(pointer, counts, starts, dtype.itemsize)

    sent, received = parts(receive if in_place else send, operation.send), parts(receive, operation.receive)
    if rooted == "bcast" or (rooted == "send" and not at_root) or (in_place and not operation.reduces):
        sent = []
    if rooted == "receive" and not at_root:
        received = []
    return Buffers(rank, len(counts), dtype, sent, received, op * operation.reduces, root)
