"""The operations that the bench measures: rows of the table of collectives, with nccl-tests' facts about each.

A *case* is one line of the bench's output, in place or out of place. Its size is the size of the largest buffer of a
rank: one block for each rank, except in reductions and the broadcast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

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
ALIASES = {"broadcast": "bcast"}
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


@dataclass(frozen=True)
class CaseBuffers:
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
