"""PacketTemplate: exchanges of one form as launches of packets.cu. A call fills in addresses, lengths and tags."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.memory import Inboxes
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    SLOT_NBYTES,
    UNIT_NBYTES,
    PacketArguments,
    Steps,
    Wire,
    finished_packet_arguments,
    packet_kernel,
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
_STEPS = struct.Struct("=5I")
_AT_MESSAGES: int = PacketArguments.sends.offset
_AT_INBOXES: int = PacketArguments.inboxes.offset
_AT_STEPS: int = PacketArguments.steps.offset
_AT_TAGS: int = PacketArguments.team.offset + Team.tags.offset
_PAIR = struct.Struct("<IQQQQ")


Kernel = tuple[Wire, Steps]
"""A kernel among those of one template."""


class PacketTemplate:
    """Launches for exchanges of one form between the same ranks.

    The form is ``exchange`` and, with ``fan_out``, the exchange after it, in which ranks send on the data that they
    have reduced or received. `places` are the pieces of memory in them, each once. ``reduction`` is (dtype, op) if any
    rank reduces. ``finish`` is applied to the result. ``host_slots`` is whether inboxes lie in memory of the host.

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
        self._size, self._rank = size, _ = int(team.size), int(team.rank)
        words, absent = f"{size}Q", f"{8 * (MAX_RANKS - size)}x"
        self._tags = struct.Struct(f"={size}I")
        self._messages = struct.Struct(f"={4 * (words + absent)}3Q")
        self._inboxes = struct.Struct(f"={words}{absent}Q")
        self._filled_inboxes: Inboxes | None = None
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
    ) -> Kernel:
        """Write a call into `arguments`, and return the kernel to launch.

        ``addresses`` and ``lengths``, in bytes, are those of `places`; both are 0 for a place without bytes. ``tag``
        says the facts in which all ranks must agree. ``nbytes`` is the most bytes that one rank sends to another, or a
        larger number; with rows, whose threads need not have a unit in each step, the bytes of all slots. ``wire``,
        ``inboxes``, ``geometry`` and ``nbytes`` are the same on all ranks.
        """
        blocks, workers = geometry
        threads, unit_nbytes = blocks * workers, UNIT_NBYTES[wire]
        units, slots = -(-nbytes // unit_nbytes), inboxes.nbytes // SLOT_NBYTES
        steps = -(-units // threads) or 1
        laps = steps if units <= slots else slots // threads
        if steps > laps and (laps < FEWEST_LAPS + self._rows or wire == "flagged"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {inboxes.nbytes} bytes")
        arguments, paced = self.arguments, 0
        if self._fans:
            tags = [tag] * self._size
        else:
            # The tag of each pair of ranks says the bytes that go each way, too, and how these bytes are cut. MPI lets
            # ranks pass different counts. A packet that is sent and not taken would stay in its slot, and a later call
            # would take it for one of its own.
            tags, made = [], dict[tuple[int, int, int, int], int]()
            for low, low_cut, high, high_cut in self._pairs:
                ways = lengths[low], low_cut, lengths[high], high_cut
                if ways not in made:
                    made[ways] = zlib.crc32(_PAIR.pack(tag, *ways))
                tags.append(made[ways])
            if not self._rows:
                # As many steps as the data between this rank and a peer takes, whatever the others send each other.
                steps = -(-max(lengths) // unit_nbytes // threads) or 1
                if steps > laps:
                    paced = self._paced(lengths, unit_nbytes * threads * laps)
        own, output, sources, targets = self._own, self._output, self._sources, self._targets
        if self._reduces and not lengths[output]:
            own = output = sources = targets = 0
        self._tags.pack_into(arguments, _AT_TAGS, *tags)
        self._messages.pack_into(
            arguments,
            _AT_MESSAGES,
            *[addresses[place] for place in self._addressed],
            *[lengths[place] for place in self._measured],
            addresses[own],
            addresses[output],
            lengths[output],
        )
        if inboxes is not self._filled_inboxes:
            self._inboxes.pack_into(arguments, _AT_INBOXES, *inboxes.pointers, inboxes.nbytes)
            self._filled_inboxes = inboxes
        _STEPS.pack_into(arguments, _AT_STEPS, steps, laps, sources, targets, paced)
        # A kernel for more steps has more to do in each of them.
        kind: Steps = "one" if steps == 1 else "few" if steps <= laps else "paced" if paced else "laps"
        return wire, kind

    def variant(self, kernel: Kernel) -> Variant:
        """Return the source and options of a kernel; raises `InvalidUsageError` for an undefined reduction."""
        return packet_kernel(
            self._reduction,
            self._size,
            *kernel,
            fan_out=self._fans,
            host_slots=self._host_slots,
            epilogue=self._options,
        )

    def _paced(self, lengths: Sequence[int], inbox_nbytes: int) -> int:
        """Return the peers, as bits, with messages longer than an inbox and of different lengths each way."""
        paced = 0
        for peer, (low, _, high, _) in enumerate(self._pairs):
            one, other = lengths[low], lengths[high]
            if one != other and peer != self._rank and max(one, other) > inbox_nbytes:
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
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if fan_out is not None or receives[rank] in (None, sends[rank]):
            sends[rank] = receives[rank] = None  # nothing to copy
        sent, received = [*map(number, sends)], [*map(number, receives)]
        self._addressed = [*sent, *received]
        self._measured = [*sent, *received]

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
                self._measured[self._size :] = self._measured[: self._size]
