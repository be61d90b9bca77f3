"""PacketTemplate: launches of packets.cu for exchanges of one form. PacketLauncher: for the calls of a form."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple
from zlib import crc32

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Domain, Filled, FormLauncher, KernelTemplate
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import (
    FEWEST_LAPS,
    OVERSEERS,
    PacketArguments,
    Steps,
    finished_packet_arguments,
    packet_kernel,
    wire_options,
)
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    ANY_NBYTES,
    Coding,
    Configs,
    PacketConfig,
    Stepped,
    coding_of,
)
from mpicomm.collectives.patterns import shard_count
from mpicomm.collectives.wire import BLOCK
from mpicomm.epilogues.base import BoundEpilogue, Fused
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mapped

# A call fills in two ranges of `PacketArguments`: the tags with the messages and the steps after them; the inboxes.
_AT_TAGS: int = PacketArguments.team.offset + Team.tags.offset
_AT_INBOXES: int = PacketArguments.inboxes.offset
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
    `apply` replaces it by another epilogue of the same kind. With ``coding`` packets carry codes.

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
        if finish is None:
            self.arguments = PacketArguments(**given)
        else:
            self.arguments = finished_packet_arguments(type(finish.arguments))(**given)
            self.apply(finish)
        self.early = domain.early
        words, absent = f"{size}Q", f"{8 * (MAX_RANKS - size)}x"
        self._messages = struct.Struct(f"={size}I{4 * (MAX_RANKS - size)}x{4 * (words + absent)}3Q5I")
        self._inboxes = struct.Struct(f"={words}{absent}Q")
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
        self._ends = _Ends.of(exchange, fan_out, rank, number, reduces=reduction is not None, copies=coding is not None)
        self._reduces = exchange.reduction is not None
        self.places: tuple[Span | None, ...] = tuple(numbers)
        """The pieces of memory of the form; the first is None, for no memory."""

    def apply(self, finish: Fused) -> None:
        """Let the kernel of the next `write` apply an epilogue."""
        self._options, self.arguments.finish = finish

    def bind(self, addresses: Sequence[int], lengths: Sequence[int], number: int) -> None:
        """Let `write` take ``number`` values. The address and the length of each place have these indices."""
        tags, ends = [number + tag for tag in self._tags], self._ends

        def picked(own: int, output: int) -> Callable[[list[int]], tuple[int, ...]]:
            """Return a function that picks the fields from a list of the values, followed by the tags."""
            messages = [*[addresses[place] for place in ends.addressed], *[lengths[place] for place in ends.measured]]
            fields = [*tags, *messages, addresses[own], addresses[output], lengths[output]]
            return itemgetter(*fields)

        self._pick, self._pick_idle = picked(ends.own, ends.output), picked(0, 0)
        self._output, self._bits = lengths[ends.output], (ends.sources, ends.targets)
        self._ways = [(lengths[low], low_cut, lengths[high], high_cut) for low, low_cut, high, high_cut in self._tagged]
        self._both_ways = [(lengths[low], lengths[high]) for low, _, high, _ in self._pairs]
        others = [pair for peer, pair in enumerate(self._both_ways) if peer != self._rank]
        indices = [*chain.from_iterable(others)]
        self._of_others: Callable[[list[int]], tuple[int, ...]] = itemgetter(*indices)

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
        pick, (sources, targets) = self._pick, self._bits
        if self._reduces and not values[self._output]:
            pick, sources, targets = self._pick_idle, 0, 0
        self._messages.pack_into(self.arguments, _AT_TAGS, *pick(values), steps, laps, sources, targets, paced)
        if config.inboxes is not self._filled_inboxes:
            inboxes = config.inboxes
            self._inboxes.pack_into(self.arguments, _AT_INBOXES, *inboxes.pointers, inboxes.nbytes)
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
            wire = wire_options(
                coding.codes, moves=reduction is None, codes_result=coding.codes_result, alike=self._alike
            )
            reduction = reduction or (coding.element, "sum")
        return packet_kernel(
            reduction,
            self._size,
            protocol,
            steps,
            fan_out=self._fans,
            host_slots=self._host_slots,
            epilogue=tuple(epilogue),
            wire=wire,
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
        of_steps: Steps = "paced" if paced else "laps"
        if steps <= laps:
            of_steps = "one" if steps == config.parts == 1 else "few"
        return ((config.protocol, of_steps), config.blocks, config.workers + OVERSEERS), steps, laps, paced

    def _steps(self, nbytes: int, config: PacketConfig) -> tuple[int, int]:
        """Return the steps of messages of so many bytes, and after how many steps a launch uses slots again."""
        units = -(-nbytes // config.unit_nbytes)
        if self._coding is not None:
            units = -(-units // LANES) * LANES
        steps = -(-units // (config.blocks * config.workers)) or 1
        laps = steps if units <= config.slots else config.laps
        if steps > laps and (laps < FEWEST_LAPS + (config.row_nbytes > 0) or config.protocol == "flagged"):
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


class _Ends(NamedTuple):
    """The places of messages and of the result of an exchange, and the ranks at their other end."""

    addressed: list[int]
    """The places of the messages to each rank, then of the messages from each rank."""
    measured: list[int]
    """The places that have the lengths of these messages."""
    own: int
    output: int
    sources: int
    targets: int

    @classmethod
    def of(
        cls, exchange: Exchange, fan_out: Exchange | None, rank: int, number: Number, *, reduces: bool, copies: bool
    ) -> _Ends:
        """Return the ends. With ``copies`` this rank copies its message to itself also if that stays in its place."""
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if fan_out is not None or receives[rank] is None or (receives[rank] == sends[rank] and not copies):
            sends[rank] = receives[rank] = None  # nothing to copy
        sent, received = [*map(number, sends)], [*map(number, receives)]
        places = [*sent, *received]
        targets = 0 if fan_out is None else sum(1 << r for r, span in enumerate(fan_out.sends) if span is not None)
        mine = exchange.reduction
        if mine is not None:
            if list(mine.sources) != sorted(mine.sources):
                raise InvalidUsageError(f"sources {mine.sources} are not in the order of ranks")
            sources = sum(1 << source for source in mine.sources)
            return cls(places, places, number(mine.own), number(mine.output), sources, targets)
        if reduces or fan_out is None:
            return cls(places, places, 0, 0, 0, 0)
        for source, span in enumerate(exchange.receives):
            if span is not None:
                return cls(places, places, 0, number(span), 1 << source, targets)
        # This rank is the source. It needs no data back, so its receives stay at address 0, where the kernel stores
        # nothing. The relays' packets only show this rank how far they are.
        return cls(places, [*sent, *sent], 0, 0, 0, 0)


class PacketLauncher(PacketTemplate, FormLauncher):
    """Carries out the calls of a ``form`` in one exchange, or with ``two_shot`` in two exchanges.

    With ``any_length`` the launch is the same for all lengths, except for a coding.
    """

    def __init__(
        self,
        form: Form,
        domain: Domain,
        configs: Configs,
        bounds: tuple[float, float],
        *,
        two_shot: bool = False,
        finishes: bool = False,
        any_length: bool = False,
    ) -> None:
        self.fewest, self.most = bounds
        self.finishes = finishes
        row_nbytes = form.epilogue.row_nbytes if finishes and form.epilogue else 0
        self._whole = BLOCK if form.wire else row_nbytes // form.itemsize
        self._itemsize, self._shards = form.itemsize, form.shards if two_shot else 0
        self._config_of, self._memory_for = configs
        self._is_private = form.is_private
        self._any_nbytes = ANY_NBYTES if any_length and form.wire is None else 0
        even = form.operation.is_even and not any_length
        self._unmade: Callable[[], None] | None = partial(self._make, form, domain, even=even)
        """Makes the template, before the first call: most forms use one or two of their launchers."""

    def _make(self, form: Form, domain: Domain, *, even: bool) -> None:
        shards = self._shards
        first, second = (form.two_shot.first, form.two_shot.second) if shards else (form.one_shot, None)
        finish = form.epilogue.fused(0) if self.finishes and form.epilogue else None
        super().__init__(
            domain, first, form.reduction, fan_out=second, finish=finish, even=even, coding=coding_of(form)
        )
        pieces = [form.piece(span, first.reduction.own if first.reduction else None) for span in self.places]
        # The values of a call: 0; the lengths of all blocks, or of the shards; the addresses of all blocks, or of the
        # shards of each block.
        blocks = form.sends + form.receives
        if shards:
            addresses = [1 + (1 + block) * shards + shard if block >= 0 else 0 for block, shard in pieces]
            self.bind(addresses, [1 + shard for _, shard in pieces], 1 + (1 + blocks) * shards)
        else:
            addresses = [1 + blocks + block if block >= 0 else 0 for block, _ in pieces]
            self.bind(addresses, [1 + block for block, _ in pieces], 1 + 2 * blocks)
        self._unmade = None

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        return self._memory_for(self._longest_shard(longest) if self._shards else longest)

    def fill(
        self,
        lengths: list[int],
        begins: list[int],
        longest: int,
        hash32: int,
        memory: Mapped | None = None,
        finish: BoundEpilogue | None = None,
    ) -> Filled | None:
        if self._unmade is not None:
            self._unmade()
        if self.finishes and finish is not None:
            self.apply(finish.fused(begins[-1], self._shards or 1))
        if self._shards:
            return self._fill_shards(lengths[0], begins, hash32)
        config = self._config_of(longest)
        if config is None:
            return None
        values = [0, *lengths, *begins]
        if self._is_private:
            self.private_nbytes = max(self._of_others(values))
            # Whatever other ranks send, short messages have the launch of the config.
            nbytes = longest if longest <= config.step_nbytes else ANY_NBYTES
        else:
            nbytes = self._any_nbytes or config.row_nbytes or longest
        return self.write(values, longest, nbytes, hash32, config)

    def _fill_shards(self, nbytes: int, begins: list[int], hash32: int) -> Filled | None:
        longest, shards = self._longest_shard(nbytes), self._shards
        config = self._config_of(longest)
        if config is None:
            return None
        number = -(-nbytes // longest)
        empty = [0] * (shards - number)  # shards after the last element
        values = [0, *[longest] * number, *empty]
        values[number] = nbytes - (number - 1) * longest
        for begin in begins:
            values += range(begin, begin + nbytes, longest)
            values += empty
        return self.write(values, longest, config.row_nbytes or longest, hash32, config)

    def _longest_shard(self, nbytes: int) -> int:
        count = shard_count(nbytes // self._itemsize, self._shards, self._itemsize, self._whole)
        return min(nbytes, count * self._itemsize)
