"""Packets: every rank stores packets into inboxes of its peers, and a packet says itself whether it has arrived.

`OneShot` sends all data straight to the ranks that need it. `TwoShot` sends a shard to each rank, which reduces or
takes it and sends the result on, in the same kernel.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import GpuCall, Node, moved
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, Arena, ArenaLayout, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    OVERSEERS,
    SLOT_NBYTES,
    STAGES,
    PacketArguments,
    Steps,
    Wire,
    carried_nbytes,
    flags_can_carry,
    most_workers,
    packet_kernel,
    packets_of,
)
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, Team
from mpicomm.mpi.span import Span

MAX_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_WORKERS = (128, 256, 512)


_ANY_NBYTES = 1 << 62
"""The length that all ranks take messages for where only the two ranks of a message know it."""


class OneShot:
    """All data goes straight to the ranks that need it."""

    name = "one_shot"
    in_rank_order = True
    into_memory = False

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return True

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        if node.size == 1:
            return "there is one rank"
        return None if self._wire(call, node) else "the inboxes are smaller than the data that goes one way"

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return _memory(node, self._wire(call, node), self._nbytes(call))

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        wire = self._wire(call, node)
        assert wire is not None
        exchange, planner = call.one_shot, PacketPlanner.of(node)
        yield planner.launch(exchange, call.reduction, call.tag(), wire, nbytes=self._nbytes(call))
        yield from moved(exchange)

    def _nbytes(self, call: GpuCall) -> int:
        # One kernel for messages of all lengths: of two kernels, the second would wait for ranks in the first.
        return _ANY_NBYTES if call.operation.counts == "private" else call.one_shot.longest_nbytes

    def _wire(self, call: GpuCall, node: Node) -> Wire | None:
        if call.operation.counts == "private":
            return "sentinel"
        to_all = call.operation.traffic != "one-way"
        # Data that goes one way alone is faster in chunks where inboxes would be used again.
        most_nbytes = inf if to_all else node.arena.layout.most_inbox_nbytes
        return _wire_for(self._nbytes(call), call.reduction, node, to_all=to_all, most_nbytes=most_nbytes)


class TwoShot:
    """Each rank reduces or receives a shard, and sends it on to all ranks that need it."""

    name = "two_shot"
    in_rank_order = True
    into_memory = False

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.two_shot is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        return None

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return _memory(node, self._wire(call, node), call.two_shot.longest_nbytes)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        wire, schedule = self._wire(call, node), call.two_shot
        assert wire is not None
        yield PacketPlanner.of(node).launch(
            schedule.first,
            call.reduction,
            call.tag(),
            wire,
            nbytes=schedule.longest_nbytes,
            fan_out=schedule.second,
        )

    def _wire(self, call: GpuCall, node: Node) -> Wire | None:
        return _wire_for(call.two_shot.longest_nbytes, call.reduction, node, to_all=True, most_nbytes=inf)


def packet_wire(
    nbytes: int, reduction: Reduction | None, most_flagged_nbytes: float, most_sentinel_nbytes: float
) -> Wire | None:
    """Return the wire for an exchange in which a rank sends another at most ``nbytes``; None if no wire fits.

    LL packets are the fastest up to ``most_flagged_nbytes``, sentinel packets up to ``most_sentinel_nbytes``.
    """
    if nbytes == 0:
        return None
    if (reduction is None or flags_can_carry(reduction[0])) and nbytes <= most_flagged_nbytes:
        return "flagged"
    return "sentinel" if nbytes <= most_sentinel_nbytes else None


def large_inboxes(layout: ArenaLayout, nbytes: int) -> Request:
    """Return the request for inboxes of the sentinel wire that hold ``nbytes`` from each rank, or a part of that."""
    slots_nbytes = _inboxes_of(layout) * layout.large_inbox_nbytes(nbytes)
    return Request("collectives: large messages", slots_nbytes, sentinel=True)


def _inboxes_of(layout: ArenaLayout) -> int:
    return PARITIES * STAGES * layout.size


def _memory(node: Node, wire: Wire | None, nbytes: int) -> Sequence[Request]:
    if wire != "sentinel" or nbytes <= node.arena.sentinels.nbytes:
        return ()
    return (large_inboxes(node.arena.layout, nbytes),)


def _wire_for(nbytes: int, reduction: Reduction | None, node: Node, *, to_all: bool, most_nbytes: float) -> Wire | None:
    most_flagged = _most_flagged_nbytes(node.size, to_all, reduces=reduction is not None) * node.link_speed
    room = carried_nbytes(node.arena.flagged.nbytes, "flagged")
    return packet_wire(nbytes, reduction, min(room, most_flagged), most_nbytes)


def _most_flagged_nbytes(size: int, to_all: bool, *, reduces: bool) -> int:
    """Return up to how many bytes LL packets are faster than others, which take half the bytes on the links."""
    if reduces:
        return 16 << 10
    # Each rank sends to all and takes from all; else a rank mostly does either.
    return (96 << 10 if to_all else 192 << 10) // (size - 1)


@dataclass(frozen=True)
class Geometry:
    """How the packets of a message are spread: ``workers`` threads of each block move data."""

    blocks: int
    workers: int

    @property
    def threads(self) -> int:
        """All threads that move data."""
        return self.blocks * self.workers

    def steps(self, units: int) -> int:
        """Return the steps for messages of ``units`` packets; one is taken in any case, to meet the others."""
        return max(1, -(-units // self.threads))


def geometry_of(units: int, most_blocks: int, size: int, *, fan_out: bool) -> Geometry:
    """Return the geometry for messages of ``units`` packets between ``size`` ranks; the same on all of them.

    As measured on H200s: one step if there can be, with as many blocks as there are, each as small as that allows.
    """
    most = most_workers(size, fan_out=fan_out, one_step=True)
    for workers in (*(each for each in _WORKERS if each < most), most):
        if units <= workers * most_blocks:
            workers = min(workers, -(-units // LANES) * LANES)
            return Geometry(-(-units // workers), workers)
    return Geometry(most_blocks, most_workers(size, fan_out=fan_out, one_step=False))


class PacketPlanner:
    """Turns exchanges into launches.

    ``team`` is what every kernel of this rank is told; with ``early`` kernels may begin before the last is over.
    ``host_slots`` is whether the arena lies in memory of the host.
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
        blocks = min(MAX_BLOCKS, node.multiprocessors)
        return cls(node.team, node.arena, blocks, early=node.early, host_slots=node.host_slots)

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
    ) -> Launch:
        """Return the launch for an exchange and, with ``fan_out``, the next one, in which ranks send on their results,
        or what they have received.

        ``reduction`` is (dtype, op) if any rank reduces; ``nbytes`` is the most that one rank sends to another, or more
        than that. All but the exchanges themselves is the same on all ranks.
        """
        size, rank = self._team.size, self._team.rank
        units = packets_of(nbytes, wire)
        shape = geometry or geometry_of(units, self._most_blocks, size, fan_out=fan_out is not None)
        arguments = PacketArguments(team=self._team)
        self._fill_inboxes(arguments, self._inboxes(wire, nbytes))
        slots, steps = arguments.inbox_nbytes // SLOT_NBYTES, shape.steps(units)
        laps = steps if units <= slots else slots // shape.threads
        if steps > laps and (laps < FEWEST_LAPS or wire == "flagged"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {arguments.inbox_nbytes} bytes")
        if fan_out is None:
            # As many as there is data for between this rank and another, whatever there is between others.
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
            packet_kernel(reduction, size, wire, kind, fan_out=fans, host_slots=self._host_slots),
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
        # Whose data it is gets flags back, at address 0: nowhere. They say that it may go on.
        arguments.receive_nbytes = arguments.send_nbytes

    def _inboxes(self, wire: Wire, nbytes: int) -> Inboxes:
        if wire == "flagged":
            return self._arena.flagged
        if nbytes <= self._arena.sentinels.nbytes:
            return self._arena.sentinels
        region = self._arena.region(large_inboxes(self._arena.layout, nbytes))
        return Inboxes(region.pointers, region.slots_nbytes // _inboxes_of(self._arena.layout))

    def _fill_inboxes(self, arguments: PacketArguments, inboxes: Inboxes) -> None:
        for peer, pointer in enumerate(inboxes.pointers):
            arguments.inboxes[peer] = pointer
        arguments.inbox_nbytes = inboxes.nbytes
        own = self._team.arenas[self._team.rank]
        arguments.flagged = self._arena.layout.flagged_inboxes(own)
        arguments.fences = own + self._arena.layout.fences


def _kind_of(arguments: PacketArguments) -> Steps:
    """Return which of the kernels takes these steps: the more there are, the more there is to see to in each."""
    if arguments.steps == 1:
        return "one"
    if arguments.steps <= arguments.laps:
        return "few"
    return "paced" if arguments.paced else "laps"


def _tag_of_pair(tag: int, rank: int, peer: int, exchange: Exchange) -> int:
    """Return what two ranks must agree on: the bytes that go each way, too, whatever MPI lets them pass.

    A packet that is sent and not taken would be left in its slot, to be taken for one of another call.
    """
    ways = exchange.nbytes_with(peer)
    return zlib.crc32(struct.pack("<IQQ", tag, *(ways if rank < peer else reversed(ways))))


def _ranks_of(spans: Sequence[Span | None]) -> int:
    return sum(1 << rank for rank, span in enumerate(spans) if span is not None)


def _extent(span: Span | None, itemsize: int) -> tuple[int, int]:
    return (span.pointer, span.count * itemsize) if span is not None and span.count else (0, 0)
