"""How a collective on GPUs is carried out: functions of what is the same on all ranks, as measured on H200s."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chunks.plan import reduction_of
from mpicomm.collectives.gpu.algorithms.packets.arguments import Wire, flags_can_carry
from mpicomm.collectives.gpu.algorithms.packets.plan import fans_out, relays
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.collectives.host.reduction import is_narrow
from mpicomm.collectives.signature import Signature
from mpicomm.errors import InvalidUsageError

_COUNTS_DIFFER = ("Alltoallv", "Gatherv", "Scatterv")  # no rank knows what the others send each other
_ALIKE = ("Allreduce", "Reduce_scatter_block", "Allgather", "Alltoall")  # all ranks send all others as much
_UNLIKE = ("Reduce_scatter", "Allgatherv", "Alltoallv")  # they may send some more than others
_ANY_NBYTES = 1 << 62
"""What all ranks take messages for where they do not know what others send each other."""


class Room(NamedTuple):
    """How many bytes from each rank inboxes hold: of the LL wire, and of the sentinel wire at most."""

    flagged: int
    sentinel: int


@dataclass(frozen=True)
class Way:
    """How one exchange is carried out, or two of which the second sends on what the first has brought.

    By packets.cu if there is a ``wire``, by direct.cu if ``direct``, else by exchange.cu; by a copy if the rank is
    ``alone`` with it, as others may not have such an exchange.
    ``nbytes`` is the most that one rank sends to another: of the first two what all ranks take it for.
    """

    step: int
    exchange: Exchange
    merged: Exchange | None
    reduction: tuple[str, str] | None
    wire: Wire | None
    direct: bool
    nbytes: int
    alone: bool = False


def can_chain(dtype: np.dtype[Any], op: str | None, root: int, size: int) -> bool:
    """Return whether a Bcast or Reduce can go along a chain of ranks, each of which needs what it receives but once.

    What is reduced is reduced in the order of ranks, which end in the last one: another root than that or the first,
    where the chain begins, would be in its middle and receive everything twice. And it travels as the type it has.
    """
    return op is None or (root in (0, size - 1) and op != "avg" and not is_narrow(dtype))


def choose_algorithm(
    tuning: Tuning,
    asked: str,
    operation: str,
    nbytes: int,
    size: int,
    *,
    registered: bool,
    chainable: bool,
) -> str:
    """Return the algorithm of a call of ``nbytes`` in all for which ``asked`` was given; see `Tuning.algorithm`.

    ``chainable`` is what `can_chain` says. Raises `InvalidUsageError` where ``asked`` is not possible.
    """
    if asked == "chain" and not chainable:
        raise InvalidUsageError(
            f'algorithm="chain" of {operation} is for the first or the last rank as root, and for types and operations '
            'that are not reduced in a wider type (of float16, bfloat16, float8, and avg): use "two_shot"'
        )
    algorithm = asked
    if asked == "auto":
        algorithm = tuning.algorithm(operation, nbytes, size, registered=registered)
    if algorithm == "chain" and not chainable:
        others = tuning.without("chain")
        algorithm = others.algorithm(operation, nbytes, size, registered=registered)
    if size == 1 or nbytes == 0:  # there is nothing to choose
        return "one_shot"
    return algorithm


def choose_ways(
    exchanges: Sequence[Exchange],
    signature: Signature,
    rank: int,
    nbytes: int,
    room: Room,
    *,
    symmetric: bool,
    link_speed: float = 1.0,
    algorithm: str = "one_shot",
) -> list[Way]:
    """Return how a collective's exchanges, those of ``algorithm``, are carried out, on all ranks alike.

    ``nbytes`` is the most that one rank sends to another; ``symmetric`` is whether the output is symmetric memory;
    ``link_speed`` scales the sizes that were measured on H200s, as `Tuning.scaled` does.
    Raises `InvalidUsageError` for a reduction that is not defined.
    """
    operation, ways, pending = signature.operation, [], list(enumerate(exchanges))
    while pending:
        step, exchange = pending.pop(0)
        if operation in _COUNTS_DIFFER and len(exchange.sends) > 1:
            # One kernel for all lengths: of two, the second would wait for those who are in the first.
            ways.append(Way(step, exchange, None, None, "sentinel", False, _ANY_NBYTES))
            continue
        # Where not all ranks reduce, it is in the first exchange: the kernel is the same on all.
        reduces = signature.op is not None and (step == 0 or exchange.reduction is not None)
        reduction = reduction_of(exchange.dtype, signature.op) if signature.op and reduces else None
        if reduction is None and operation.startswith("Reduce_scatter"):
            ways.append(Way(step, exchange, None, None, None, False, nbytes, alone=True))
            continue
        merges = fans_out if reduction else relays
        following = pending[0][1] if pending and merges(rank, exchange, pending[0][1]) else None
        direct = symmetric and reduction is None and following is None and exchange.lands is not None
        wire = None
        # The ring has an order of its own, which packets do not know.
        if len(exchange.sends) > 1 and algorithm != "ring":
            alike = following is not None or operation in _ALIKE
            if not (direct and nbytes > _most_copied_nbytes(len(exchange.sends)) * link_speed):
                to_all = alike or operation in _UNLIKE
                flagged = _most_flagged_nbytes(len(exchange.sends), to_all, reduces=reduction is not None) * link_speed
                # What goes one way alone is faster in chunks where inboxes would be used again.
                sentinel = inf if to_all else room.sentinel
                wire = packet_wire(nbytes, reduction, min(room.flagged, flagged), sentinel)
        if wire is None:
            following = None  # packets.cu alone sends on what it has just reduced or received
        elif following is not None:
            pending.pop(0)
        ways.append(Way(step, exchange, following, reduction, wire, direct and wire is None, nbytes))
    return ways


def _most_copied_nbytes(size: int) -> int:
    """Return up to where packets, which are copied where they arrive, are faster than direct.cu, which needs no copy.

    They save two barriers. What else they take grows with all that a rank sends and the ranks that send to it at once.
    """
    return 76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2


def _most_flagged_nbytes(size: int, to_all: bool, *, reduces: bool) -> int:
    """Return up to where LL packets are faster than others, which take half the bytes on the links."""
    if reduces:
        return 16 << 10
    # Each rank sends to all and takes from all; else mostly one does either.
    return (96 << 10 if to_all else 192 << 10) // (size - 1)


def packet_wire(
    nbytes: int, reduction: tuple[str, str] | None, most_flagged_nbytes: float, most_sentinel_nbytes: float
) -> Wire | None:
    """Return how packets.cu carries out an exchange; None if exchange.cu does.

    ``nbytes`` is the most that one rank sends to another: up to ``most_flagged_nbytes`` LL packets are the fastest, up
    to ``most_sentinel_nbytes`` the others.
    """
    if nbytes == 0:
        return None
    if (reduction is None or flags_can_carry(reduction[0])) and nbytes <= most_flagged_nbytes:
        return "flagged"
    return "sentinel" if nbytes <= most_sentinel_nbytes else None
