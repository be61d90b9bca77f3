"""Exchanges of packets.cu: which messages go that way, and their launches."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.launch import Launch
from mpicomm.collectives.gpu.algorithms.memory import Arena, Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    OVERSEERS,
    SLOT_NBYTES,
    PacketArguments,
    Steps,
    Wire,
    most_workers,
    packet_kernel,
    packets_of,
)
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.team import LANES, Team
from mpicomm.mpi.span import Span

MAX_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_WORKERS = (128, 256, 512)


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

    def launch(
        self,
        exchange: Exchange,
        reduction: tuple[str, str] | None,
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
        return self._arena.large_inboxes(nbytes)

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


def fans_out(rank: int, exchange: Exchange, following: Exchange) -> bool:
    """Whether the second exchange only sends what the first has reduced to others; true on a rank without a part."""
    result = exchange.reduction.output if exchange.reduction else None
    return (
        following.reduction is None
        and all(send in (None, result) for send in following.sends)
        and following.sends[rank] in (None, following.receives[rank])
    )


def relays(rank: int, exchange: Exchange, following: Exchange) -> bool:
    """Whether the second exchange only sends on what the first has brought, between ranks that the first leaves free.

    True on a rank that takes no part in the second.
    """
    return (
        exchange.reduction is None
        and following.reduction is None
        and following.sends[rank] is None
        and all(
            later is None or (first is None and later in exchange.receives)
            for first, later in zip(exchange.sends, following.sends, strict=True)
        )
        and all(
            later is None or first is None for first, later in zip(exchange.receives, following.receives, strict=True)
        )
    )


def _ranks_of(spans: Sequence[Span | None]) -> int:
    return sum(1 << rank for rank, span in enumerate(spans) if span is not None)


def _extent(span: Span | None, itemsize: int) -> tuple[int, int]:
    return (span.pointer, span.count * itemsize) if span is not None and span.count else (0, 0)
