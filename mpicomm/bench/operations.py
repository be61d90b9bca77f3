"""The collectives that can be measured: how much each moves, between which parts of two buffers, as nccl-tests counts.

A *case* is one line of the table, in place or out of place. Its size is that of the largest buffer a rank has, which
for all but the reductions and the broadcast is one block for each rank.
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
    """Bus bandwidth by algorithm bandwidth, of the number of ranks: what makes it comparable with a link's."""
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
    """What one rank calls: an operation on ``block`` elements for each rank it has a block for."""

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
        """Elements of the largest buffer a rank has; none of a barrier's, whatever it is carried out with."""
        if self.name == "barrier":
            return 0
        blocks = self.operation.sends_blocks or self.operation.receives_blocks
        return self.block * (self.size if blocks else 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the largest buffer a rank has: the size that bandwidths are computed from."""
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
        """Return counts and displacements of alltoallv's blocks: uneven ones, the same to a rank as from it."""
        counts = [self.block * (2 * ((self.rank + peer) % self.size) + 1) // self.size for peer in range(self.size)]
        return counts, [sum(counts[:peer]) for peer in range(self.size)]

    def algbw_gb_s(self, time_us: float) -> float:
        """Return the size by the time, in GB/s."""
        return self.nbytes / time_us * 1e-3

    def busbw_gb_s(self, time_us: float) -> float:
        """Return what each link has to carry by the time, in GB/s."""
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
    """Lay a case out in two arrays of bytes, in place in the first alone.

    ``result_at_front`` is where an in-place reduce-scatter leaves its block: MPI's at the front of the buffer, NCCL's
    in its place among the blocks.
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
        # Of a gather the root alone has the blocks to be in place among.
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
