"""The collectives to measure: how much each moves, between which parts of two buffers, as nccl-tests counts.

A *case* is one line of the table, in place or out of place. Its size is that of the largest buffer of a rank: one block
for each rank, except in reductions and the broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

ROOT = 0


def _moved_once(size: int) -> float:
    return (size - 1) / size


def _moved_twice(size: int) -> float:
    return 2 * (size - 1) / size


def _all_of_it(size: int) -> float:
    return 1.0


@dataclass(frozen=True)
class Operation:
    """One collective."""

    name: str
    bus_factor: Callable[[int], float]
    """Bus bandwidth divided by algorithm bandwidth, by the number of ranks: bus bandwidth compares with a link's."""
    sends_blocks: bool = False
    """Whether the input has a block for each rank."""
    receives_blocks: bool = False
    """Whether the output has a block for each rank."""
    reduces: bool = False
    rooted: bool = False
    places: tuple[str, ...] = ("out-of-place", "in-place")


OUT_OF_PLACE, IN_PLACE = "out-of-place", "in-place"

OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("allreduce", _moved_twice, reduces=True),
        Operation("reduce_scatter", _moved_once, sends_blocks=True, reduces=True),
        Operation("allgather", _moved_once, receives_blocks=True),
        Operation("bcast", _all_of_it, rooted=True, places=(IN_PLACE,)),  # MPI's has one buffer
        Operation("reduce", _all_of_it, reduces=True, rooted=True),
        Operation("gather", _moved_once, receives_blocks=True, rooted=True),
        Operation("scatter", _moved_once, sends_blocks=True, rooted=True),
        Operation("alltoall", _moved_once, sends_blocks=True, receives_blocks=True, places=(OUT_OF_PLACE,)),
        Operation("alltoallv", _moved_once, sends_blocks=True, receives_blocks=True, places=(OUT_OF_PLACE,)),
        Operation("sendrecv", _all_of_it, places=(OUT_OF_PLACE,)),
        Operation("barrier", _all_of_it, places=(OUT_OF_PLACE,)),
    )
}
ALIASES = {"broadcast": "bcast"}


@dataclass(frozen=True)
class Case:
    """The call of one rank: an operation on blocks of ``block`` elements."""

    operation: Operation
    dtype: np.dtype[Any]
    op: str
    block: int
    in_place: bool
    rank: int
    size: int

    @property
    def name(self) -> str:
        """The collective's name."""
        return self.operation.name

    def at(self, place: str) -> Case:
        """Return the case in or out of place."""
        return replace(self, in_place=place == IN_PLACE)

    @property
    def count(self) -> int:
        """The elements of the largest buffer of a rank; 0 for a barrier, whatever data it moves."""
        if self.name == "barrier":
            return 0
        blocks = self.operation.sends_blocks or self.operation.receives_blocks
        return self.block * (self.size if blocks else 1)

    @property
    def nbytes(self) -> int:
        """The bytes of the largest buffer of a rank: the size from which bandwidths are computed."""
        return self.count * self.dtype.itemsize

    @property
    def at_root(self) -> bool:
        """Whether this rank has the buffer that only the root has."""
        return self.rank == ROOT

    @property
    def following(self) -> int:
        """The rank that sendrecv sends to."""
        return (self.rank + 1) % self.size

    @property
    def previous(self) -> int:
        """The rank that sendrecv receives from."""
        return (self.rank - 1) % self.size

    def exchanged(self) -> tuple[list[int], list[int]]:
        """Return counts and displacements of alltoallv's blocks: uneven, but each the same to a rank as from it."""
        counts = [self.block * (2 * ((self.rank + peer) % self.size) + 1) // self.size for peer in range(self.size)]
        return counts, [sum(counts[:peer]) for peer in range(self.size)]

    def algbw_gb_s(self, time_us: float) -> float:
        """Return the size divided by the time, in GB/s."""
        return self.nbytes / time_us * 1e-3

    def busbw_gb_s(self, time_us: float) -> float:
        """Return the bytes that each link has to carry, divided by the time, in GB/s."""
        return self.algbw_gb_s(time_us) * self.operation.bus_factor(self.size)


def block_of(operation: Operation, nbytes: int, dtype: np.dtype[Any], size: int) -> int:
    """Return the elements of a block, at least one, where the largest buffer has ``nbytes``."""
    blocks = size if operation.sends_blocks or operation.receives_blocks else 1
    return max(1, nbytes // (dtype.itemsize * blocks))


@dataclass(frozen=True)
class Buffers:
    """Input and output of a case, as bytes; None where this rank has none. In place, one is part of the other."""

    send: Any
    receive: Any


def buffers(case: Case, first: Any, second: Any, *, result_at_front: bool) -> Buffers:
    """Return the buffers of a case in two arrays of bytes; in place, in the first array alone.

    ``result_at_front``: whether an in-place reduce-scatter leaves its block at the front of the buffer, as MPI does, or
    at its place among the blocks, as NCCL does.
    """
    operation = case.operation
    block, whole = case.block * case.dtype.itemsize, case.nbytes
    own = first[case.rank * block : (case.rank + 1) * block]
    send: Any
    receive: Any
    if case.name == "bcast":
        send = receive = first[:whole]
    elif not case.in_place:
        send = first[: whole if operation.sends_blocks else block]
        receive = second[: whole if operation.receives_blocks else block]
    elif operation.receives_blocks:
        # In a gather only the root has all blocks, so only the root is in place.
        send, receive = (own, first[:whole]) if not operation.rooted or case.at_root else (first[:block], None)
    elif case.name == "reduce_scatter":
        send, receive = first[:whole], first[:block] if result_at_front else own
    elif case.name == "scatter":
        send, receive = first[:whole], own if case.at_root else second[:block]
    else:
        send = receive = first[:block]
    if operation.rooted and not case.at_root and case.name != "bcast":
        if case.name == "scatter":
            send = None
        else:
            receive = None
    return Buffers(send, receive)
