"""Protocols: the kinds of packets, and the longest messages for which each kind is the fastest."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.packets.arguments import Protocol, carried_nbytes, flags_can_carry
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction


class ProtocolLimits(NamedTuple):
    """The most bytes from one rank to another for which LL packets and sentinel packets are the fastest."""

    flagged: float
    sentinel: float


def packet_protocol(nbytes: int, limits: ProtocolLimits) -> Protocol | None:
    """Return the protocol for messages of at most ``nbytes``, or None if no protocol fits."""
    most_flagged, most_sentinel = limits
    if nbytes <= most_flagged:
        return "flagged" if nbytes else None
    return "sentinel" if nbytes <= most_sentinel else None


def one_shot_limits(operation: Operation, reduction: Reduction | None, node: Node) -> ProtocolLimits:
    """Return the limits of calls in one exchange."""
    to_all = operation.traffic != "one-way"
    # If a launch would reuse slots of inboxes, chunks are faster for data that only goes one way.
    return _limits(reduction, node, to_all=to_all, sentinel=inf if to_all else node.arena.layout.most_inbox_nbytes)


def two_shot_limits(reduction: Reduction | None, node: Node) -> ProtocolLimits:
    """Return the limits of calls in two exchanges."""
    return _limits(reduction, node, to_all=True, sentinel=inf)


def _limits(reduction: Reduction | None, node: Node, *, to_all: bool, sentinel: float) -> ProtocolLimits:
    if reduction is not None and not flags_can_carry(reduction[0]):
        return ProtocolLimits(0, sentinel)
    fastest = _most_flagged_nbytes(node.size, to_all, reduces=reduction is not None) * node.link_speed
    return ProtocolLimits(min(carried_nbytes(node.arena.flagged.nbytes, "flagged"), fastest), sentinel)


def _most_flagged_nbytes(size: int, to_all: bool, *, reduces: bool) -> int:
    """Return the most bytes for which LL packets are faster than sentinel packets, which halve the traffic."""
    if reduces:
        return 16 << 10
    # With to_all each rank sends to all and receives from all; else a rank mostly does one of these.
    return (96 << 10 if to_all else 192 << 10) // (size - 1)
