"""PacketTemplate: exchanges of one form as launches of packets.cu. A call fills in addresses, lengths and tags."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.memory import Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    SLOT_NBYTES,
    PacketArguments,
    Steps,
    Wire,
    finished_packet_arguments,
    packet_kernel,
    packets_of,
)
from mpicomm.collectives.gpu.algorithms.packets.geometry import Geometry
from mpicomm.errors import InvalidUsageError
from mpicomm.finishes.base import Fused
from mpicomm.kernels.ll_flags import FlaggedInboxes
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.span import Span

# The fields of `PacketArguments` that a call fills in; a test compares the places with the structure.
_MESSAGES = struct.Struct(f"={4 * MAX_RANKS + 3}Q")
_INBOXES = struct.Struct(f"={MAX_RANKS + 1}Q")
_STEPS = struct.Struct("=5I")
_TAGS = struct.Struct(f"={MAX_RANKS}I")
_AT_MESSAGES: int = PacketArguments.sends.offset
_AT_INBOXES: int = PacketArguments.inboxes.offset
_AT_STEPS: int = PacketArguments.steps.offset
_AT_TAGS: int = PacketArguments.team.offset + Team.tags.offset
_PAIR = struct.Struct("<IQQQQ")


class PacketLaunch(NamedTuple):
    """A kernel of packets.cu by its wire and its steps, and the threads that it runs on."""

    wire: Wire
    steps: Steps
    geometry: Geometry


class PacketTemplate:
    """Launches for exchanges of one form between the same ranks.

    The form is ``exchange`` and, with ``fan_out``, the exchange after it, in which ranks send on the data that they
    have reduced or received. `places` are the pieces of memory in them, each once. ``reduction`` is (dtype, op) if any
    rank reduces. ``finish`` is applied to the result. ``reused`` is the kernel option for inboxes in host memory.

    `fill` writes one call into `arguments`. The next `fill` overwrites it, so a caller launches the kernel in between.
    """

    def __init__(
        self,
        team: Team,
        flagged: FlaggedInboxes,
        fences: int,
        exchange: Exchange,
        reduction: Reduction | None,
        *,
        fan_out: Exchange | None = None,
        finish: Fused | None = None,
        host_slots: bool = False,
    ) -> None:
        self._reduction = reduction
        self._host_slots = host_slots
        self._fans = fan_out is not None
        self._rows = finish is not None and finish.rows is not None
        self._options = finish.options if finish else ()
        self._variants: dict[tuple[Wire, Steps], Variant] = {}
        self._size, self._rank = int(team.size), int(team.rank)
        if finish is None:
            self.arguments = PacketArguments(team=team, flagged=flagged, fences=fences)
        else:
            cls = finished_packet_arguments(type(finish.arguments))
            self.arguments = cls(team=team, flagged=flagged, fences=fences, finish=finish.arguments)
        self._numbers: dict[Span | None, int] = {None: 0}
        self._read_messages(exchange, fan_out)
        self._read_result(exchange, fan_out)
        self.places: tuple[Span | None, ...] = tuple(self._numbers)
        """The pieces of memory of the form in the order in which `fill` takes them; the first one is no memory."""

    def fill(
        self,
        addresses: Sequence[int],
        lengths: Sequence[int],
        tag: int,
        wire: Wire,
        inboxes: Inboxes,
        geometry: Geometry,
        nbytes: int,
    ) -> PacketLaunch:
        """Write a call into `arguments`, and return the kernel to launch.

        ``addresses`` and ``lengths``, in bytes, are those of `places`; both are 0 for a place without bytes. ``tag``
        says the facts in which all ranks must agree. ``nbytes`` is the most bytes that one rank sends to another, or a
        larger number; with rows, whose threads need not have a unit in each step, the bytes of all slots. ``wire``,
        ``inboxes``, ``geometry`` and ``nbytes`` are the same on all ranks.
        """
        units = packets_of(nbytes, wire)
        slots, steps = inboxes.nbytes // SLOT_NBYTES, geometry.steps(units)
        laps = steps if units <= slots else slots // geometry.threads
        if steps > laps and (laps < FEWEST_LAPS + self._rows or wire == "flagged"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {inboxes.nbytes} bytes")
        arguments, paced = self.arguments, 0
        if self._fans:
            tags = [tag] * self._size
        else:
            tags = self._tags_of_pairs(tag, lengths)
            if not self._rows:
                # As many steps as the data between this rank and a peer takes, whatever the others send each other.
                longest = max([lengths[place] for place in self._between])
                steps = geometry.steps(packets_of(longest, wire))
                if steps > laps:
                    paced = self._paced(lengths, wire, geometry, laps)
        own, output, sources, targets = self._own, self._output, self._sources, self._targets
        if self._reduces and not lengths[output]:
            own = output = sources = targets = 0
        _TAGS.pack_into(arguments, _AT_TAGS, *tags, *self._no_tags)
        _MESSAGES.pack_into(
            arguments,
            _AT_MESSAGES,
            *[addresses[place] for place in self._messages],
            *[lengths[place] for place in self._message_lengths],
            addresses[own],
            addresses[output],
            lengths[output],
        )
        _INBOXES.pack_into(arguments, _AT_INBOXES, *inboxes.pointers, *self._no_tags, inboxes.nbytes)
        _STEPS.pack_into(arguments, _AT_STEPS, steps, laps, sources, targets, paced)
        # A kernel for more steps has more to do in each of them.
        kind: Steps = "one" if steps == 1 else "few" if steps <= laps else "paced" if paced else "laps"
        return PacketLaunch(wire, kind, geometry)

    def variant(self, launch: PacketLaunch) -> Variant:
        """Return the kernel of a launch; raises `InvalidUsageError` for a reduction that is not defined."""
        key = launch.wire, launch.steps
        if key not in self._variants:
            self._variants[key] = packet_kernel(
                self._reduction,
                self._size,
                launch.wire,
                launch.steps,
                fan_out=self._fans,
                host_slots=self._host_slots,
                epilogue=self._options,
            )
        return self._variants[key]

    def _tags_of_pairs(self, tag: int, lengths: Sequence[int]) -> list[int]:
        """Return for each peer the number in which this rank and the peer must agree.

        The number stands for the call, for the bytes that go each way, and for how these bytes are cut. MPI lets ranks
        pass different counts. A packet that is sent and not taken would stay in its slot, and a later call would take
        it for one of its own.
        """
        tags, made = [], dict[tuple[int, int, int, int], int]()
        for low, low_cut, high, high_cut in self._pairs:
            ways = lengths[low], low_cut, lengths[high], high_cut
            found = made.get(ways)
            if found is None:
                found = made[ways] = zlib.crc32(_PAIR.pack(tag, *ways))
            tags.append(found)
        return tags

    def _paced(self, lengths: Sequence[int], wire: Wire, geometry: Geometry, laps: int) -> int:
        """Return the peers, as bits, with messages longer than an inbox and of different lengths each way."""
        paced = 0
        for peer, (low, _, high, _) in enumerate(self._pairs):
            one, other = lengths[low], lengths[high]
            if one != other and peer != self._rank and geometry.steps(packets_of(max(one, other), wire)) > laps:
                paced |= 1 << peer
        return paced

    def _number(self, span: Span | None) -> int:
        return self._numbers.setdefault(span, len(self._numbers))

    def _read_messages(self, exchange: Exchange, fan_out: Exchange | None) -> None:
        rank, size, number = self._rank, self._size, self._number
        mine = exchange.reduction
        taken = list(exchange.receives)
        for source in mine.sources if mine is not None else ():
            taken[source] = mine.output if mine is not None else None
        # For each peer the way up and the way down the ranks, so that both ranks of a pair make one number of them.
        self._pairs: list[tuple[int, int, int, int]] = []
        for peer in range(size):
            sent_cut, taken_cut = exchange.cuts[peer] if exchange.cuts else (0, 0)
            out, back = (number(exchange.sends[peer]), sent_cut), (number(taken[peer]), taken_cut)
            self._pairs.append((*out, *back) if rank < peer else (*back, *out))
        self._between = sorted({place for low, _, high, _ in self._pairs for place in (low, high)})
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if fan_out is not None or receives[rank] in (None, sends[rank]):
            sends[rank] = receives[rank] = None  # nothing to copy
        absent = [0] * (MAX_RANKS - size)
        self._no_tags = absent
        sent, received = [*map(number, sends), *absent], [*map(number, receives), *absent]
        self._messages = [*sent, *received]
        self._message_lengths = [*sent, *received]

    def _read_result(self, exchange: Exchange, fan_out: Exchange | None) -> None:
        mine, number = exchange.reduction, self._number
        self._own = self._output = self._sources = self._targets = 0
        self._reduces = mine is not None
        targets = 0 if fan_out is None else sum(1 << r for r, span in enumerate(fan_out.sends) if span is not None)
        if mine is not None:
            if list(mine.sources) != sorted(mine.sources):
                raise InvalidUsageError(f"sources {mine.sources} are not in the order of ranks")
            self._sources = sum(1 << source for source in mine.sources)
            self._own, self._output, self._targets = number(mine.own), number(mine.output), targets
        if self._reduction is None and fan_out is not None:
            relayed = [(source, span) for source, span in enumerate(exchange.receives) if span is not None]
            if relayed:
                source, span = relayed[0]
                self._sources, self._output, self._targets = 1 << source, number(span), targets
            else:
                # This rank is the source. It needs no data back, so its receives stay at address 0, where the kernel
                # stores nothing. The relays' packets tell it how far they are.
                self._message_lengths[MAX_RANKS:] = self._message_lengths[:MAX_RANKS]
