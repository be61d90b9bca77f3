"""Exchanges of packets as launches of packets.cu."""

from __future__ import annotations

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, Arena, ArenaLayout, Inboxes, Region, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import OVERSEERS, STAGES, Wire, packets_of
from mpicomm.collectives.gpu.algorithms.packets.geometry import MAX_BLOCKS, Geometry, geometry_of
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.finishes.base import Fused
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import Team


def large_inboxes(layout: ArenaLayout, nbytes: int) -> Request:
    """Return the request for inboxes of the sentinel wire that hold ``nbytes`` from each rank, or a part of that."""
    slots_nbytes = _number_of_inboxes(layout) * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)


def inboxes_of(layout: ArenaLayout, region: Region) -> Inboxes:
    """Return the inboxes in a region that was set up for `large_inboxes`."""
    return Inboxes(region.pointers, region.slots_nbytes // _number_of_inboxes(layout))


def _number_of_inboxes(layout: ArenaLayout) -> int:
    return PARITIES * STAGES * layout.size


def most_blocks_of(node: Node) -> int:
    """Return the most blocks of a launch between the ranks of a node."""
    return min(MAX_BLOCKS, node.multiprocessors)


class PacketPlanner:
    """Turns exchanges into launches.

    Every kernel of this rank gets ``team``. With ``early`` the blocks of a kernel may be set up before the kernel ahead
    of it has ended. ``host_slots`` is whether the arena lies in host memory.
    """

    def __init__(
        self, team: Team, arena: Arena, most_blocks: int, *, early: bool = True, host_slots: bool = False
    ) -> None:
        self._team = team
        self.early = early
        self._host_slots = host_slots
        self._arena = arena
        self._most_blocks = most_blocks

    @classmethod
    def of(cls, node: Node) -> PacketPlanner:
        """Return the planner for this rank of a node."""
        return cls(node.team, node.arena, most_blocks_of(node), early=node.early, host_slots=node.host_slots)

    def launch(
        self,
        exchange: Exchange,
        reduction: Reduction | None,
        tag: int,
        wire: Wire,
        *,
        nbytes: int,
        fan_out: Exchange | None = None,
        geometry: Geometry | None = None,
        inboxes: Inboxes | None = None,
        finish: Fused | None = None,
    ) -> Launch:
        """Return the launch for an exchange and, with ``fan_out``, for the exchange after it.

        See `PacketTemplate.fill`, whose arguments have values without a choice here unless they are given.
        """
        template = self.template(exchange, reduction, fan_out=fan_out, finish=finish)
        itemsize = exchange.dtype.itemsize
        lengths = [0 if span is None else span.count * itemsize for span in template.places]
        addresses = [span.pointer if span is not None and span.count else 0 for span in template.places]
        inboxes = inboxes or self.inboxes(wire, nbytes)
        geometry = geometry or self.geometry(wire, nbytes, fan_out=fan_out is not None)
        number = len(lengths)
        template.bind(range(number), range(number, 2 * number), 2 * number)
        kernel = template.fill([*addresses, *lengths], max(lengths), tag, wire, inboxes, geometry, nbytes)
        return Launch(
            template.variant(kernel),
            template.arguments,
            blocks=geometry.blocks,
            threads=geometry.workers + OVERSEERS,
            early=self.early,
        )

    def template(
        self,
        exchange: Exchange,
        reduction: Reduction | None,
        *,
        fan_out: Exchange | None = None,
        finish: Fused | None = None,
        alike: bool = False,
    ) -> PacketTemplate:
        """Return the template for exchanges of the form of these; see `PacketTemplate`."""
        own = self._team.arenas[self._team.rank]
        return PacketTemplate(
            self._team,
            self._arena.layout.flagged_inboxes(own),
            own + self._arena.layout.fences,
            exchange,
            reduction,
            fan_out=fan_out,
            finish=finish,
            host_slots=self._host_slots,
            alike=alike,
        )

    def geometry(self, wire: Wire, nbytes: int, *, fan_out: bool) -> Geometry:
        """Return the threads for messages of up to ``nbytes``."""
        return geometry_of(packets_of(nbytes, wire), self._most_blocks, int(self._team.size), fan_out=fan_out)

    def inboxes(self, wire: Wire, nbytes: int) -> Inboxes:
        """Return the inboxes for messages of up to ``nbytes``; the arena has memory for them."""
        if wire == "flagged":
            return self._arena.flagged
        if nbytes <= self._arena.sentinels.nbytes:
            return self._arena.sentinels
        layout = self._arena.layout
        return inboxes_of(layout, self._arena.region(large_inboxes(layout, nbytes)))
