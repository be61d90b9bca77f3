"""PacketCalls: the calls of one form as launches of packets.cu. It is the `Template` of the algorithms of packets."""

from __future__ import annotations

import itertools

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.packets.arguments import OVERSEERS, UNIT_NBYTES, PacketArguments
from mpicomm.collectives.gpu.algorithms.packets.geometry import geometry_of
from mpicomm.collectives.gpu.algorithms.packets.launches import (
    PacketPlanner,
    inboxes_of,
    large_inboxes,
    most_blocks_of,
)
from mpicomm.collectives.gpu.algorithms.packets.template import Kernel
from mpicomm.collectives.gpu.algorithms.packets.wires import WireLimits, packet_wire
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.collectives.patterns import shard_count
from mpicomm.kernels.variant import Variant


class PacketCalls:
    """Calls of ``form`` in one exchange, or with ``two_shot`` in two. ``limits`` choose the wire."""

    def __init__(self, form: Form, node: Node, limits: WireLimits, *, two_shot: bool) -> None:
        planner = PacketPlanner.of(node)
        first, second = (form.two_shot.first, form.two_shot.second) if two_shot else (form.one_shot, None)
        self._template = planner.template(first, form.reduction, fan_out=second, alike=not two_shot)
        own = first.reduction.own if first.reduction is not None else None
        self._pieces = [form.piece(span, own) for span in self._template.places]
        self._parts = form.shards if two_shot else 1 + max(piece.part for piece in self._pieces)
        self._two_shot = two_shot
        self._arena = node.arena
        self._flagged, self._sentinels = node.arena.flagged, node.arena.sentinels
        self._most_blocks, self._size = most_blocks_of(node), node.size
        self._reduction = form.reduction
        self._itemsize = form.itemsize
        self._limits = limits
        self.arguments: PacketArguments = self._template.arguments
        self.early = planner.early

    def fill(self, send: int, receive: int, nbytes: int, hash32: int) -> Filled | None:
        """See `Template`."""
        parts, longest = self._parts, nbytes
        if self._two_shot:
            longest = min(nbytes, shard_count(nbytes // self._itemsize, parts, self._itemsize) * self._itemsize)
            starts = [min(nbytes, part * longest) for part in range(parts + 1)]
            lengths = [after - start for start, after in itertools.pairwise(starts)]
        else:
            starts, lengths = [part * nbytes for part in range(parts)], [nbytes] * parts
        wire = packet_wire(longest, self._reduction, *self._limits)
        if wire is None:
            return None
        inboxes = self._flagged if wire == "flagged" else self._sentinels
        if wire == "sentinel" and longest > inboxes.nbytes:
            request = large_inboxes(self._arena.layout, longest)
            if not self._arena.has(request):
                return None
            inboxes = inboxes_of(self._arena.layout, self._arena.region(request))
        geometry = geometry_of(-(-longest // UNIT_NBYTES[wire]), self._most_blocks, self._size, fan_out=self._two_shot)
        lengths.append(0)  # of a piece without data, whose part is -1
        buffers = (0, send, receive)
        kernel = self._template.fill(
            [buffers[buffer] + starts[part] if buffer and lengths[part] else 0 for buffer, part in self._pieces],
            [lengths[part] for _, part in self._pieces],
            longest,
            hash32,
            wire,
            inboxes,
            geometry,
            longest,
        )
        return kernel, geometry[0], geometry[1] + OVERSEERS

    def variant(self, kernel: Kernel) -> Variant:
        """See `Template`."""
        return self._template.variant(kernel)
