"""Ways: the wire, the inboxes and the threads that messages of packets take, by their length."""

from __future__ import annotations

from collections.abc import Callable

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.memory import Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import UNIT_NBYTES, Wire
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry, geometry_of, geometry_within
from mpicomm.collectives.gpu.algorithms.packets.launches import inboxes_of, large_inboxes, most_blocks_of
from mpicomm.collectives.gpu.algorithms.packets.wires import WireLimits, packet_wire
from mpicomm.kernels.reductions import Reduction

Way = tuple[Wire, Inboxes, Geometry, int]
"""The wire, the inboxes, the threads, and the most bytes from one rank to another, as all ranks take them to be."""
WayOf = Callable[[int], Way | None]
"""Returns the way for messages of so many bytes at most, None where a call has to be planned: alike on all ranks."""

ANY_NBYTES = 1 << 62
"""The length that all ranks take messages for whose length only two ranks know."""


def sized_ways(limits: WireLimits, reduction: Reduction | None, node: Node, *, fan_out: bool) -> WayOf:
    """Return the ways of calls in which all ranks know the longest message."""
    arena, layout, size, most_blocks = node.arena, node.arena.layout, node.size, most_blocks_of(node)
    flagged, sentinels = arena.flagged, arena.sentinels

    def way_of(nbytes: int) -> Way | None:
        wire = packet_wire(nbytes, reduction, *limits)
        if wire is None:
            return None
        inboxes = flagged if wire == "flagged" else sentinels
        if nbytes > sentinels.nbytes:
            request = large_inboxes(layout, nbytes)
            if not arena.has(request):
                return None  # the ranks set memory up when they plan a call
            inboxes = inboxes_of(layout, arena.region(request))
        return wire, inboxes, geometry_of(-(-nbytes // UNIT_NBYTES[wire]), most_blocks, size, fan_out=fan_out), nbytes

    return way_of


def any_length_ways(node: Node) -> WayOf:
    """Return the way of calls in which only two ranks know the length of a message, whatever the length."""
    arena, size, most_blocks = node.arena, node.size, most_blocks_of(node)
    return lambda nbytes: (
        "sentinel",
        arena.any_length,
        geometry_within(arena.any_length.nbytes, most_blocks, size),
        ANY_NBYTES,
    )
