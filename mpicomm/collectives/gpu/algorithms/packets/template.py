"""PacketTemplate: launches of packets.cu for exchanges of one form."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any
from zlib import crc32

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Domain, Filled, KernelTemplate
from mpicomm.collectives.gpu.algorithms.memory import Inboxes
from mpicomm.collectives.gpu.algorithms.packets import arguments as kernels
from mpicomm.collectives.gpu.algorithms.packets.configs import Coding, PacketConfig, Stepped
from mpicomm.collectives.packed import Gaps, Strides
from mpicomm.epilogues.base import Fused
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.arguments import Span

# A call fills in two ranges of `PacketArguments`: the tags with the messages and the steps after them; the inboxes.
_AT_TAGS: int = kernels.PacketArguments.team.offset + Team.tags.offset
_AT_INBOXES: int = kernels.PacketArguments.stages.offset
_pack_pair = struct.Struct("<IQQQQ").pack

Number = Callable[[Span | None], int]
"""Returns the number of a place. A new place gets the next number."""
Kernel = tuple[Any, ...]
"""A kernel of one template: its `Protocol`, its `Steps`, and the options of its epilogue."""


class PacketTemplate(KernelTemplate):
    """Launches for exchanges of one form between the same ranks.

    The form is ``exchange`` and, with ``fan_out``, the next exchange, in which ranks send on the data that they have
    reduced or received. `places` are the pieces of memory in both exchanges, each once. With ``even`` the tag of a call
    implies all lengths. ``reduction`` is (dtype, op) if any rank reduces. The kernel applies ``finish`` to the result.
    `apply` replaces it by another epilogue of the same kind. With ``coding`` packets carry codes. ``gaps`` are those in
    the message to each rank and in the message from each rank, if any message has gaps.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between.
    """

    def __init__(
        self,
        domain: Domain,
        exchange: Exchange,
        reduction: Reduction | None,
        *,
        fan_out: Exchange | None = None,
        finish: Fused | None = None,
        even: bool = False,
        coding: Coding | None = None,
        gaps: tuple[Sequence[Gaps | None], Sequence[Gaps | None]] | None = None,
    ) -> None:
        self._reduction = reduction
        self._coding = coding
        mine, sent = exchange.reduction, {span for span in exchange.sends if span is not None}
        self._alike = fan_out is None and len(sent) == 1 and (mine is None or mine.own in sent)
        self._host_slots = domain.host_slots
        self._fans = fan_out is not None
        self._options: tuple[str, ...] = ()
        self._size, self._rank = size, rank = domain.size, domain.rank
        team, layout = domain.team, domain.arena.layout
        own = team.arenas[rank]
        given = {"team": team, "flagged": layout.flagged_inboxes(own), "fences": own + layout.fences}
        self._is_strided = gaps is not None
        if gaps is not None:
            self.arguments = strided = kernels.StridedPacketArguments(**given)
            firsts, regions = dict[Gaps, int](), list[Strides]()
            for fields, of_ranks in zip((strided.send_gaps, strided.receive_gaps), gaps, strict=True):
                for peer, each in enumerate(of_ranks):
                    if each is not None:
                        if each not in firsts:  # ranks that get the same data have the same gaps
                            firsts[each] = len(regions)
                            regions += each.regions
                        fields[peer] = firsts[each], each.grain
            strided.strides[: len(regions)] = regions
        elif finish is None:
            self.arguments = kernels.PacketArguments(**given)
        else:
            self.arguments = kernels.finished_packet_arguments(type(finish.arguments))(**given)
            self.apply(finish)
        self.early = domain.early
        words, absent = f"{size}Q", f"{8 * (MAX_RANKS - size)}x"
        self._messages = struct.Struct(f"={size}I{4 * (MAX_RANKS - size)}x{4 * (words + absent)}3Q5I")
        self._inboxes = struct.Struct(f"=I{words}{absent}Q")
        self._filled_inboxes: Inboxes | None = None
        self._cut: tuple[int, PacketConfig | None, int, int] = 0, None, 0, 0
        """The last arguments of `_steps`, and its result."""

        numbers: dict[Span | None, int] = {None: 0}

        def number(span: Span | None) -> int:
            return numbers.setdefault(span, len(numbers))

        self._pairs = pairs = _pairs(exchange, rank, number)
        # A call makes one tag for each different pair. `_tags` has the number of the tag for each peer. This rank does
        # not compare its tag for itself.
        pairs = [*pairs[:rank], pairs[rank - 1], *pairs[rank + 1 :]]
        different = list(dict.fromkeys(pairs))
        self._has_one_tag = self._fans or even
        self._tagged = [] if self._has_one_tag else different
        self._tags = [0] * size if self._has_one_tag else [different.index(each) for each in pairs]
        self._reduces = mine is not None
        self._note_ends(exchange, fan_out, number)
        self.places: tuple[Span | None, ...] = tuple(numbers)
        """The pieces of memory of the form; the first is None, for no memory."""

    def _note_ends(self, exchange: Exchange, fan_out: Exchange | None, number: Number) -> None:
        """Note the places of the messages and of the result, and the ranks at their other end."""
        rank, mine = self._rank, exchange.reduction
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if self._fans or receives[rank] is None or (receives[rank] == sends[rank] and self._coding is None):
            sends[rank] = receives[rank] = None  # nothing to copy; codes are copied also to their place
        to, of = [*map(number, sends)], [*map(number, receives)]
        self._addressed, self._measured = [*to, *of], [*to, *of]
        """The places of the messages to each rank and from each rank, and the places that have their lengths."""
        self._own = self._output = self._sources = 0
        self._targets = (
            0 if fan_out is None else sum(1 << r for r, span in enumerate(fan_out.sends) if span is not None)
        )
        if mine is not None:
            self._sources = sum(1 << source for source in mine.sources)
            self._own, self._output = number(mine.own), number(mine.output)
        elif self._reduction is not None or fan_out is None:
            self._targets = 0
        else:
            taken = [source for source, span in enumerate(exchange.receives) if span is not None]
            if taken:
                self._sources, self._output = 1 << taken[0], number(exchange.receives[taken[0]])
            else:
                # This rank is the source. It needs no data back, so its receives stay at address 0, where the kernel
                # stores nothing. The relays' packets only show this rank how far they are.
                self._measured, self._targets = [*to, *to], 0

    def apply(self, finish: Fused) -> None:
        """Let the kernel of the next `write` apply an epilogue."""
        self._options, self.arguments.finish = finish

    def bind(self, addresses: Sequence[int], lengths: Sequence[int], number: int) -> None:
        """Let `write` take ``number`` values. The address and the length of each place have these indices."""
        tags = [number + tag for tag in self._tags]

        def picked(own: int, output: int) -> Callable[[list[int]], tuple[int, ...]]:
            """Return a function that picks the fields from a list of the values, followed by the tags."""
            messages = [addresses[place] for place in self._addressed] + [lengths[place] for place in self._measured]
            fields = [*tags, *messages, addresses[own], addresses[output], lengths[output]]
            return itemgetter(*fields)

        self._pick, self._pick_idle = picked(self._own, self._output), picked(0, 0)
        self._output_nbytes = lengths[self._output]
        self._ways = [(lengths[low], low_cut, lengths[high], high_cut) for low, low_cut, high, high_cut in self._tagged]
        self._both_ways = [(lengths[low], lengths[high]) for low, _, high, _ in self._pairs]

    def write(self, values: list[int], longest: int, nbytes: int, tag: int, config: PacketConfig) -> Filled:
        """Write a call into `arguments`. This changes ``values``.

        `bind` defines the order of ``values``. Lengths are in bytes, and a place without bytes has address 0.
        ``longest`` is the largest length. ``nbytes`` are the most bytes from one rank to another, as all ranks know
        them. ``tag`` is made of the facts in which all ranks must agree. These three last are the same on all ranks.
        """
        if nbytes <= config.step_nbytes:
            filled, steps, laps, paced = config.in_one_step
        else:
            filled, steps, laps, paced = self._in_steps(values, longest, nbytes, config)
        if self._has_one_tag:
            values.append(tag)
        else:
            # MPI lets ranks pass different counts. So the tag of each pair of ranks also contains the bytes that go
            # each way, and how these bytes are cut. A packet that no rank takes would stay in its slot, and a later
            # call would take it as its own data.
            for low, low_cut, high, high_cut in self._ways:
                values.append(crc32(_pack_pair(tag, values[low], low_cut, values[high], high_cut)))
        pick, sources, targets = self._pick, self._sources, self._targets
        if self._reduces and not values[self._output_nbytes]:
            pick, sources, targets = self._pick_idle, 0, 0
        self._messages.pack_into(self.arguments, _AT_TAGS, *pick(values), steps, laps, sources, targets, paced)
        if config.inboxes is not self._filled_inboxes:
            inboxes = config.inboxes
            self._inboxes.pack_into(self.arguments, _AT_INBOXES, inboxes.stages, *inboxes.pointers, inboxes.nbytes)
            self._filled_inboxes = inboxes
        if self._options:
            kernel, blocks, threads = filled
            return (*kernel, *self._options), blocks, threads
        return filled

    def variant(self, kernel: Kernel) -> Variant:
        """Return the source and options of a kernel; raises `InvalidUsageError` for an undefined reduction."""
        (protocol, steps, *epilogue), coding, reduction = kernel, self._coding, self._reduction
        wire: tuple[str, ...] = ()
        if coding is not None:
            wire = kernels.wire_options(
                coding.codes, moves=reduction is None, codes_result=coding.codes_result, alike=self._alike
            )
            reduction = reduction or (coding.element, "sum")
        return kernels.packet_kernel(
            reduction,
            self._size,
            protocol,
            steps,
            fan_out=self._fans,
            host_slots=self._host_slots,
            epilogue=tuple(epilogue),
            wire=wire,
            strided=self._is_strided,
        )

    def _in_steps(self, values: list[int], longest: int, nbytes: int, config: PacketConfig) -> Stepped:
        """Return the launch of a call that takes several steps on some rank."""
        of, cut_by, steps, laps = self._cut
        if nbytes != of or config is not cut_by:  # calls of any length always have the same cut
            steps, laps = self._steps(nbytes, config)
            self._cut = nbytes, config, steps, laps
        threads, paced = config.blocks * config.workers, 0
        if not (self._fans or config.row_nbytes):
            # The steps that the data between this rank and its peers takes, whatever the other ranks send.
            steps = -(-longest // (config.unit_nbytes * threads)) or 1
            if steps > laps:
                paced = self._paced(values, config.unit_nbytes * threads * laps)
        # A kernel for more steps has more work in each step.
        of_steps: kernels.Steps = "paced" if paced else "laps"
        if steps <= laps:
            of_steps = "one" if steps == config.parts == 1 else "few"
        return ((config.protocol, of_steps), config.blocks, config.workers + kernels.OVERSEERS), steps, laps, paced

    def _steps(self, nbytes: int, config: PacketConfig) -> tuple[int, int]:
        """Return the steps of messages of so many bytes, and after how many steps a launch uses slots again."""
        units = -(-nbytes // config.unit_nbytes)
        if self._coding is not None:
            units = -(-units // LANES) * LANES
        steps = -(-units // (config.blocks * config.workers)) or 1
        laps = steps if units <= config.slots else config.laps
        if steps > laps and (laps < kernels.FEWEST_LAPS + (config.row_nbytes > 0) or config.protocol == "flagged"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {config.inboxes.nbytes} bytes")
        return steps, laps

    def _paced(self, values: list[int], inbox_nbytes: int) -> int:
        """Return the peers, as bits, with a message longer than an inbox and different lengths each way."""
        paced = 0
        for peer, (low, high) in enumerate(self._both_ways):
            one, other = values[low], values[high]
            if one != other and peer != self._rank and max(one, other) > inbox_nbytes:
                paced |= 1 << peer
        return paced


def _pairs(exchange: Exchange, rank: int, number: Number) -> list[tuple[int, int, int, int]]:
    """Return for each peer the places of the data from the lower rank and from the higher rank, each with its cut.

    So both ranks of a pair make the same tag of them.
    """
    mine, taken, pairs = exchange.reduction, list(exchange.receives), []
    if mine is not None:
        for source in mine.sources:
            taken[source] = mine.output
    for peer, (sent, received) in enumerate(zip(exchange.sends, taken, strict=True)):
        sent_cut, received_cut = exchange.cuts[peer] if exchange.cuts else (0, 0)
        out, back = (number(sent), sent_cut), (number(received), received_cut)
        pairs.append((*out, *back) if rank < peer else (*back, *out))
    return pairs
