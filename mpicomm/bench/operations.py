"""The operations that the bench measures: rows of the table of collectives, with nccl-tests' facts about each.

A *case* is one line of the bench's output, in place or out of place. Its size is the size of the largest buffer of a
rank: one block for each rank, except in reductions and the broadcast.

Buffers hold random data, which every rank can make for every other rank. The data of a rank repeats after a prime
number of elements, far from every power of two. So blocks, chunks and shards in a wrong place do not match. NumPy
computes one period of the result in rank order. The check compares every element of an array of any size with that
period, on the device of the array.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicomm.collectives import operations as collectives
from mpicomm.collectives.operations import Operation as Collective
from mpicomm.mpi.types import COVERED

ROOT = 0
OUT_OF_PLACE, IN_PLACE = "out-of-place", "in-place"


@dataclass(frozen=True, eq=False)
class BenchOperation:
    """A collective, or one of the two calls that the table of collectives does not have."""

    name: str
    """Its name on the command line, the same as in nccl-tests."""
    collective: Collective | None
    """Its row in the table; None for `SENDRECV` and `BARRIER`."""
    crossings: int
    """How often all bytes but a rank's own block cross a link; 0 if each byte crosses it once.

    It gives the bus bandwidth, which is comparable to the bandwidth of a link.
    """
    places: tuple[str, ...] = (OUT_OF_PLACE, IN_PLACE)

    @property
    def reduces(self) -> bool:
        """Whether it combines elements of all ranks."""
        return self.collective is not None and self.collective.reduces

    @property
    def rooted(self) -> str:
        """The buffer that only the root has, as `Collective.rooted` says, or ""."""
        return self.collective.rooted if self.collective else ""

    @property
    def sends_blocks(self) -> bool:
        """Whether the input has a block for each rank."""
        return self.collective is not None and self.collective.send != "one"

    @property
    def receives_blocks(self) -> bool:
        """Whether the output has a block for each rank."""
        return self.collective is not None and self.collective.receive != "one"

    def blocks(self, ranks: int) -> int:
        """Return the number of blocks in the largest buffer of a rank."""
        return ranks if self.sends_blocks or self.receives_blocks else 1


SENDRECV = BenchOperation("sendrecv", None, 0, (OUT_OF_PLACE,))
"""Every rank sends to the next rank, and receives from the previous rank."""
BARRIER = BenchOperation("barrier", None, 0, (OUT_OF_PLACE,))

OPERATIONS = {
    operation.name: operation
    for operation in (
        BenchOperation("allreduce", collectives.ALLREDUCE, 2),
        BenchOperation("reduce_scatter", collectives.REDUCE_SCATTER_BLOCK, 1),
        BenchOperation("allgather", collectives.ALLGATHER, 1),
        BenchOperation("allgatherv", collectives.ALLGATHERV, 1, (OUT_OF_PLACE,)),
        BenchOperation("bcast", collectives.BCAST, 0, (IN_PLACE,)),  # it has one buffer
        BenchOperation("reduce", collectives.REDUCE, 0),
        BenchOperation("gather", collectives.GATHER, 1),
        BenchOperation("scatter", collectives.SCATTER, 1),
        BenchOperation("alltoall", collectives.ALLTOALL, 1, (OUT_OF_PLACE,)),
        BenchOperation("alltoallv", collectives.ALLTOALLV, 1, (OUT_OF_PLACE,)),
        SENDRECV,
        BARRIER,
    )
}
DTYPES = tuple(name for name in COVERED if name not in ("bool", "complex64", "complex128"))


@dataclass(frozen=True)
class Case:
    """The call of one rank: an operation on blocks of ``block`` elements."""

    operation: BenchOperation
    dtype: np.dtype[Any]
    op: str
    block: int
    in_place: bool
    rank: int
    size: int
    share: float = 1.0
    """The mean size of the calls, divided by the size of the case. It is below 1 if calls vary."""

    def at(self, place: str) -> Case:
        """Return the case in or out of place."""
        return replace(self, in_place=place == IN_PLACE)

    @property
    def count(self) -> int:
        """The elements of the largest buffer of a rank; 0 for a barrier, even if a library moves data for it."""
        if self.operation is BARRIER:
            return 0
        return self.block * self.operation.blocks(self.size)

    @property
    def nbytes(self) -> int:
        """The bytes of the largest buffer of a rank. Bandwidths use this size."""
        return self.count * self.dtype.itemsize

    @property
    def has_input(self) -> bool:
        """Whether this rank sends data."""
        return self.rank == ROOT or self.operation.rooted not in ("send", "bcast")

    @property
    def has_output(self) -> bool:
        """Whether this rank has a buffer to receive into."""
        return self.rank == ROOT or self.operation.rooted != "receive"

    @property
    def shares_buffer(self) -> bool:
        """Whether one buffer holds input and output of this rank.

        In a rooted call in place only the root has such a buffer.
        """
        return self.in_place and (self.rank == ROOT or not self.operation.rooted)

    @property
    def sources(self) -> list[int]:
        """The ranks that send data to this rank, in the order of their data in the output."""
        if self.operation is BARRIER or not self.has_output:
            return []
        if self.operation is SENDRECV:
            return [(self.rank - 1) % self.size]
        return [ROOT] if self.operation.rooted in ("send", "bcast") else list(range(self.size))

    def sent(self) -> tuple[list[int], list[int]]:
        """Return counts and displacements of this rank's data for each rank, in elements.

        The blocks of a vector operation are uneven. Together they have as many elements as even blocks.
        """
        collective, everybody = self.operation.collective, range(self.size)
        if collective is None or collective.send == "one":
            uneven = collective is not None and collective.receive == "vector"
            count = self.block * (2 * self.rank + 1) // self.size if uneven else self.block
            return [count] * self.size, [0] * self.size
        if collective.send == "blocks":
            return [self.block] * self.size, [peer * self.block for peer in everybody]
        counts = [self.block * (2 * ((self.rank + peer) % self.size) + 1) // self.size for peer in everybody]
        return counts, [sum(counts[:peer]) for peer in everybody]

    def received(self) -> tuple[list[int], list[int]]:
        """Return counts and displacements of the data of each rank in this rank's output, in elements."""
        counts = [self.seen_from(peer).sent()[0][self.rank] for peer in range(self.size)]
        return counts, [sum(counts[:peer]) for peer in range(self.size)]

    def seen_from(self, rank: int) -> Case:
        """Return the case of another rank."""
        return replace(self, rank=rank)

    def rates(self, time_us: float) -> dict[str, float]:
        """Return GB/s: the size divided by the time, and the bytes that each link must carry divided by the time."""
        algbw = self.share * self.nbytes / time_us * 1e-3
        crossings = self.operation.crossings
        return {"algbw": algbw, "busbw": algbw * (crossings * (self.size - 1) / self.size if crossings else 1)}


def blocks_of(operation: BenchOperation, sizes: Iterable[int], dtype: np.dtype[Any], ranks: int) -> list[int]:
    """Return the elements of a block at each size of the largest buffer, without repetition.

    A block has at least one.
    """
    if operation is BARRIER:
        return [1]
    block_nbytes = dtype.itemsize * operation.blocks(ranks)
    return list(dict.fromkeys(max(1, nbytes // block_nbytes) for nbytes in sizes))


class CaseBuffers(NamedTuple):
    """Input and output of a case, as bytes; None if this rank has none.

    In place, one is part of the other. If both have the same bytes, both are the same object.
    """

    send: Any
    receive: Any


def buffers(case: Case, first: Any, second: Any, *, result_at_front: bool) -> CaseBuffers:
    """Return the buffers of a case in two arrays of bytes. In place, both lie in the first array.

    With ``result_at_front`` an in-place reduce-scatter leaves its block at the front of the buffer, as MPI does.
    Otherwise it leaves the block at its place among the blocks, as NCCL does.
    """
    operation = case.operation
    block, whole = case.block * case.dtype.itemsize, case.nbytes
    if operation.rooted == "bcast":
        whole_buffer = first[:whole]
        return CaseBuffers(whole_buffer, whole_buffer)
    one = case.sent()[0][case.rank] * case.dtype.itemsize
    send = first[: whole if operation.sends_blocks else one]
    receive = second[: whole if operation.receives_blocks else block]
    if case.shares_buffer:
        own = first[case.rank * block : (case.rank + 1) * block]
        if operation.receives_blocks:
            send, receive = own, first[:whole]
        elif operation.sends_blocks:
            receive = first[:block] if operation.reduces and result_at_front else own
        else:
            receive = send
    return CaseBuffers(send if case.has_input else None, receive if case.has_output else None)


_PERIOD = 1_000_003
POISON = 0xA5  # bytes that no data has
_SAMPLE = 4096  # the elements to compare at each end of a block, if a result need not be exact
_EPSILON = {1: 2.0**-2, 2: 2.0**-7, 4: 2.0**-22, 8: 2.0**-51}  # the coarsest float type of each size, one bit spared

_UFUNCS = {"sum": np.add, "avg": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}
OPS = tuple(_UFUNCS)


@dataclass(frozen=True)
class ExpectedPart:
    """A part of an output: ``count`` elements from ``start`` on equal elements of a period from ``offset`` on."""

    start: int
    count: int
    period: int
    offset: int


REDUCED = -1
"""The number of the reduction's period. The period of a rank's data has the number of the rank."""


class Content:
    """The data of all ranks, up to ``longest`` elements each, for one element type and operation."""

    def __init__(self, xp: Any, dtype: np.dtype[Any], op: str, size: int, longest: int, *, reduces: bool) -> None:
        self._xp = xp
        self._dtype = dtype
        self._size = size
        self._word = np.dtype(f"uint{8 * dtype.itemsize}")
        data = [random_data(dtype, min(longest, _PERIOD), rank) for rank in range(size)]
        if reduces:
            data.append(reduce_in_order(op, data))  # at the end, because REDUCED is -1
        self._host = data
        self._periods = [xp.asarray(period.view(self._word)) for period in data]

    def prepare(self, case: Case, buffers: CaseBuffers) -> None:
        """Poison the buffer that a case receives into, and write the data that it sends."""
        if buffers.receive is not None:
            buffers.receive.fill(POISON)
        if case.has_input:
            self.write(buffers.send, case.rank)

    def write(self, array: Any, rank: int) -> None:
        """Write the data of a rank into an array."""
        words = array.view(self._word)
        for start, stop, data in self._tiles(rank, 0, words.size):
            words[start:stop] = data

    def count_differing(self, array: Any, period: int, offset: int = 0) -> int:
        """Return the number of elements that differ from those of a period from ``offset`` on. It compares all."""
        words = array.view(self._word)
        tiles = self._tiles(period, offset, words.size)
        return int(sum(self._xp.count_nonzero(words[start:stop] != data) for start, stop, data in tiles))

    def count_wrong(self, case: Case, buffers: CaseBuffers, *, exact: bool, error: float = 0.0) -> int:
        """Return the number of wrong elements that a case received.

        It compares all elements, bit by bit. With ``exact=False`` it compares only the ends of each block, with a
        tolerance for another order of additions. ``error`` is as in `Contender`.
        """
        pieces = expected(case)
        if buffers.receive is None or not pieces:
            return 0
        words = buffers.receive.view(self._word)
        if not error and (exact or not case.operation.reduces):
            return sum(
                self.count_differing(words[piece.start : piece.start + piece.count], piece.period, piece.offset)
                for piece in pieces
            )
        if case.operation.reduces and case.op != "avg":
            error *= self._size
        return sum(self._count_far(words, piece, error) for piece in pieces)

    def _tiles(self, period: int, offset: int, count: int) -> list[tuple[int, int, Any]]:
        """Cut ``count`` elements of the repeated data into (start, stop, part of the period)."""
        data = self._periods[period]
        tiles, start = [], 0
        while start < count:
            begin = (offset + start) % data.size
            step = min(count - start, data.size - begin)
            tiles.append((start, start + step, data[begin : begin + step]))
            start += step
        return tiles

    def _count_far(self, words: Any, piece: ExpectedPart, error: float) -> int:
        wrong = 0
        for start in {0, max(0, piece.count - _SAMPLE)}:
            count = min(_SAMPLE, piece.count - start)
            part = words[piece.start + start : piece.start + start + count]
            found = (part if isinstance(part, np.ndarray) else part.get()).view(self._dtype)
            period = self._host[piece.period]
            wanted = period[(piece.offset + start + np.arange(count)) % period.size]
            if self._dtype.kind in "iu":
                wrong += int(np.count_nonzero(found != wanted))
                continue
            found, wanted = found.astype(np.float64), wanted.astype(np.float64)
            tolerance = self._size * self._size * _EPSILON[self._dtype.itemsize] + error
            wrong += int(np.count_nonzero(~(np.abs(found - wanted) <= tolerance)))  # a NaN is wrong
        return wrong


def random_data(dtype: np.dtype[Any], count: int, rank: int) -> npt.NDArray[Any]:
    """Return a rank's data: integers of all bits, floats between -1 and 1."""
    generator = np.random.default_rng([2026, rank])
    if dtype.kind in "iu":
        return generator.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    return generator.uniform(-1, 1, count).astype(dtype)


def reduce_in_order(op: str, data: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Return the reduction in rank order. Floats below 32 bits are accumulated in float32 and rounded once."""
    dtype = data[0].dtype
    wide = np.dtype(np.float32) if dtype.itemsize < 4 and dtype.kind not in "iu" else dtype
    with np.errstate(over="ignore"):
        total = data[0].astype(wide)
        for part in data[1:]:
            total = _UFUNCS[op](total, part.astype(wide))
        if op == "avg":
            total = total / wide.type(len(data))
        return total.astype(dtype)


def expected(case: Case) -> list[ExpectedPart]:
    """Return the parts of the output of a case on this rank."""
    rank, block = case.rank, case.block
    if case.operation.reduces:
        offset = rank * block if case.operation.sends_blocks else 0
        return [ExpectedPart(0, block, REDUCED, offset)] if case.has_output else []
    pieces, start = [], 0
    for peer in case.sources:
        counts, displs = case.seen_from(peer).sent()
        pieces.append(ExpectedPart(start, counts[rank], peer, displs[rank]))
        start += counts[rank]
    return pieces
