"""Exchanges of packets as launches of packets.cu."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, Arena, ArenaLayout, Inboxes, Region, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    OVERSEERS,
    SLOT_NBYTES,
    STAGES,
    PacketArguments,
    Steps,
    Wire,
    finished_packet_arguments,
    most_workers,
    packet_kernel,
    packets_of,
)
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.errors import InvalidUsageError
from mpicomm.finishes.base import Fused
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, Team
from mpicomm.mpi.span import Span

MAX_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_WORKERS = (128, 256, 512)


def large_inboxes(layout: ArenaLayout, nbytes: int) -> Request:
    """Return the request for inboxes of the sentinel wire that hold ``nbytes`` from each rank, or a part of that."""
    slots_nbytes = _number_of_inboxes(layout) * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)


def inboxes_of(layout: ArenaLayout, region: Region) -> Inboxes:
    """Return the inboxes in a region that was set up for `large_inboxes`."""
    return Inboxes(region.pointers, region.slots_nbytes // _number_of_inboxes(layout))


def _number_of_inboxes(layout: ArenaLayout) -> int:
    return PARITIES * STAGES * layout.size


@dataclass(frozen=True)
class Geometry:
    """The threads among which the packets of a message are spread: ``workers`` threads of each block move data."""

    blocks: int
    workers: int

    @property
    def threads(self) -> int:
        """All threads that move data."""
        return self.blocks * self.workers

    def steps(self, units: int) -> int:
        """Return the steps for messages of ``units`` packets; at least one, because each rank must meet its peers."""
        return max(1, -(-units // self.threads))


def geometry_of(units: int, most_blocks: int, size: int, *, fan_out: bool) -> Geometry:
    """Return the geometry for messages of ``units`` packets between ``size`` ranks; the same on all of them.

    As measured on H200s: one step if that is possible, with as many blocks as there are, each as small as that allows.
    """
    most = most_workers(size, fan_out=fan_out, one_step=True)
    for workers in (*(each for each in _WORKERS if each < most), most):
        if units <= workers * most_blocks:
            workers = min(workers, -(-units // LANES) * LANES)
            return Geometry(-(-units // workers), workers)
    return Geometry(most_blocks, most_workers(size, fan_out=fan_out, one_step=False))


def geometry_within(inbox_nbytes: int, most_blocks: int, size: int) -> Geometry:
    """Return the geometry for messages of any length in inboxes of that size; the same on all ranks.

    It has as many threads as leave an inbox the steps that it needs to be used again within a launch.
    """
    room = inbox_nbytes // SLOT_NBYTES // (FEWEST_LAPS * most_blocks) // LANES * LANES
    return Geometry(most_blocks, min(room, most_workers(size, fan_out=False, one_step=False)))


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
        self._early = early
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

        In ``fan_out`` ranks send on the data that they have reduced or received. ``reduction`` is (dtype, op) if any
        rank reduces. ``nbytes`` is the most bytes that one rank sends to another, or a larger number. All arguments but
        the exchanges are the same on all ranks. ``finish`` is applied to the result; with rows, whose threads need not
        have a unit in each step, ``nbytes`` are those of all slots.
        """
        size, rank = self._team.size, self._team.rank
        units = packets_of(nbytes, wire)
        shape = geometry or geometry_of(units, self._most_blocks, size, fan_out=fan_out is not None)
        arguments = PacketArguments(team=self._team)
        if finish is not None:
            arguments = finished_packet_arguments(type(finish.arguments))(team=self._team, finish=finish.arguments)
        self._fill_inboxes(arguments, inboxes or self._inboxes(wire, nbytes))
        rows = finish is not None and finish.rows is not None
        slots, steps = arguments.inbox_nbytes // SLOT_NBYTES, shape.steps(units)
        laps = steps if units <= slots else slots // shape.threads
        if steps > laps and (laps < FEWEST_LAPS + rows or wire == "flagged"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {arguments.inbox_nbytes} bytes")
        if fan_out is None and not rows:
            # As many steps as the data between this rank and one peer takes, whatever the other ranks send each other.
            packets = [[packets_of(way, wire) for way in exchange.nbytes_with(peer)] for peer in range(size)]
            steps = shape.steps(max(map(max, packets)))
            for peer, (sent, taken) in enumerate(packets):
                if peer != rank and sent != taken and shape.steps(max(sent, taken)) > laps:
                    arguments.paced |= 1 << peer
        arguments.steps, arguments.laps = steps, laps
        self._fill_messages(arguments, exchange, fan_out)
        for peer in range(size):
            arguments.team.tags[peer] = _tag_of_pair(tag, rank, peer, exchange) if fan_out is None else tag
        mine = exchange.reduction
        if mine is not None and mine.output.count > 0:
            if list(mine.sources) != sorted(mine.sources):
                raise InvalidUsageError(f"sources {mine.sources} are not in the order of ranks")
            arguments.sources = sum(1 << source for source in mine.sources)
            arguments.own = mine.own.pointer if mine.own else 0
            arguments.output, arguments.output_nbytes = _extent(mine.output, exchange.dtype.itemsize)
            if fan_out is not None:
                arguments.targets = _ranks_of(fan_out.sends)
        if reduction is None and fan_out is not None:
            self._fill_relay(arguments, exchange, fan_out)
        kind, fans = _kind_of(arguments), fan_out is not None
        return Launch(
            packet_kernel(
                reduction,
                size,
                wire,
                kind,
                fan_out=fans,
                host_slots=self._host_slots,
                epilogue=finish.options if finish else (),
            ),
            arguments,
            blocks=shape.blocks,
            threads=shape.workers + OVERSEERS,
            early=self._early,
        )

    def _fill_messages(self, arguments: PacketArguments, exchange: Exchange, fan_out: Exchange | None) -> None:
        rank, itemsize = self._team.rank, exchange.dtype.itemsize
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if fan_out is not None or receives[rank] in (None, sends[rank]):
            sends[rank] = receives[rank] = None  # nothing to copy
        for peer in range(self._team.size):
            arguments.sends[peer], arguments.send_nbytes[peer] = _extent(sends[peer], itemsize)
            arguments.receives[peer], arguments.receive_nbytes[peer] = _extent(receives[peer], itemsize)

    def _fill_relay(self, arguments: PacketArguments, exchange: Exchange, fan_out: Exchange) -> None:
        for source, span in enumerate(exchange.receives):
            if span is not None:
                arguments.sources = 1 << source
                arguments.output, arguments.output_nbytes = _extent(span, exchange.dtype.itemsize)
                arguments.targets = _ranks_of(fan_out.sends)
                return
        # This rank is the source. It needs no data back, so its receives stay at address 0, where the kernel stores
        # nothing. The relays' packets tell it how far they are.
        arguments.receive_nbytes = arguments.send_nbytes

    def _inboxes(self, wire: Wire, nbytes: int) -> Inboxes:
        if wire == "flagged":
            return self._arena.flagged
        if nbytes <= self._arena.sentinels.nbytes:
            return self._arena.sentinels
        layout = self._arena.layout
        return inboxes_of(layout, self._arena.region(large_inboxes(layout, nbytes)))

    def _fill_inboxes(self, arguments: PacketArguments, inboxes: Inboxes) -> None:
        for peer, pointer in enumerate(inboxes.pointers):
            arguments.inboxes[peer] = pointer
        arguments.inbox_nbytes = inboxes.nbytes
        own = self._team.arenas[self._team.rank]
        arguments.flagged = self._arena.layout.flagged_inboxes(own)
        arguments.fences = own + self._arena.layout.fences


def _kind_of(arguments: PacketArguments) -> Steps:
    """Return the kernel for these steps; a kernel for more steps has more to do in each of them."""
    if arguments.steps == 1:
        return "one"
    if arguments.steps <= arguments.laps:
        return "few"
    return "paced" if arguments.paced else "laps"


def _tag_of_pair(tag: int, rank: int, peer: int, exchange: Exchange) -> int:
    """Return the number in which two ranks must agree: the call, and the bytes that go each way and how they are cut.

    MPI lets ranks pass different counts. A packet that is sent and not taken would stay in its slot, and a later call
    would take it for one of its own.
    """
    sent, sent_cut, received, received_cut = exchange.agreed_with(peer)
    ways = (sent, sent_cut, received, received_cut) if rank < peer else (received, received_cut, sent, sent_cut)
    return zlib.crc32(struct.pack("<IQQQQ", tag, *ways))


def _ranks_of(spans: Sequence[Span | None]) -> int:
    return sum(1 << rank for rank, span in enumerate(spans) if span is not None)


def _extent(span: Span | None, itemsize: int) -> tuple[int, int]:
    return (span.pointer, span.count * itemsize) if span is not None and span.count else (0, 0)
