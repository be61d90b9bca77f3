"""Ways: the protocol, the inboxes and the threads of messages, by their length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import STAGES, UNIT_NBYTES, Protocol
from mpicomm.collectives.gpu.algorithms.packets.geometry import (
    Geometry,
    geometries_of,
    geometry_within,
    most_blocks_of,
)
from mpicomm.collectives.gpu.algorithms.packets.protocols import ProtocolLimits, packet_protocol

Way = tuple[Protocol, Inboxes, Geometry, int]
"""The protocol, the inboxes, the threads, and the most bytes from one rank to another, the same number on all ranks.

With rows a thread may have no unit in a step. Then the bytes count all slots.
"""
WayOf = Callable[[int], "Way | None"]
"""Returns the way for messages of at most so many bytes; None if the engine has to plan the call. Alike on all
ranks."""

ANY_NBYTES = 1 << 62
"""The length that all ranks assume for a message if only two ranks know its length."""


def sized_ways(limits: ProtocolLimits, node: Node, *, fan_out: bool = False) -> WayOf:
    """Return the ways of calls in which all ranks know the longest message, if the arena has the inboxes."""
    most_units, geometries = geometries_of(most_blocks_of(node), node.size, fan_out=fan_out)
    arena, flagged, sentinels = node.arena, node.arena.flagged, node.arena.sentinels

    def way_of(nbytes: int) -> Way | None:
        protocol = packet_protocol(nbytes, limits)
        if protocol is None:
            return None
        if protocol == "flagged":
            inboxes = flagged
        elif nbytes <= sentinels.nbytes:
            inboxes = sentinels
        else:
            request = large_inboxes(arena.layout, nbytes)
            if not arena.has(request):
                return None  # the ranks set up memory when they plan a call
            inboxes = inboxes_of(arena.layout, arena.region(request))
        return protocol, inboxes, geometries[bisect_left(most_units, -(-nbytes // UNIT_NBYTES[protocol]))], nbytes

    return way_of


def any_length_ways(node: Node) -> WayOf:
    """Return the way of calls in which only two ranks know the length of a message; one way for all lengths."""
    arena, way = node.arena, any_length_way(node, node.arena.any_length)

    def way_of(nbytes: int) -> Way:
        nonlocal way
        if way[1] is not arena.any_length:  # the ranks have set up larger inboxes
            way = any_length_way(node, arena.any_length)
        return way

    return way_of


def any_length_way(node: Node, inboxes: Inboxes) -> Way:
    """Return the way of messages of any length in these inboxes."""
    return "sentinel", inboxes, geometry_within(inboxes.nbytes, most_blocks_of(node), node.size), ANY_NBYTES


def large_inboxes(layout: ArenaLayout, nbytes: int) -> Request:
    """Return the request for inboxes of the sentinel protocol for ``nbytes`` from each rank, or for a part of them."""
    slots_nbytes = _number_of_inboxes(layout) * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)


def inboxes_of(layout: ArenaLayout, region: ArenaRegion) -> Inboxes:
    """Return the inboxes in a region for a request of `large_inboxes`."""
    return Inboxes(region.pointers, region.slots_nbytes // _number_of_inboxes(layout))


def _number_of_inboxes(layout: ArenaLayout) -> int:
    return PARITIES * STAGES * layout.size
