"""Packets: every rank stores packets into inboxes of its peers, and a packet itself shows whether it has arrived.

One launch of packets.cu carries the whole call. It also carries elements quantized.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from operator import itemgetter
from typing import Any
from zlib import crc32

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, KernelTemplate, Numbers
from mpicomm.collectives.gpu.algorithms.memory import Domain, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets import arguments as kernels
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    ANY_NBYTES,
    Configs,
    PacketConfig,
    ProtocolLimits,
    Stepped,
    any_length_config,
    fewest_rows,
    limits_of,
    row_configs,
    sized_configs,
    wire_format_of,
)
from mpicomm.collectives.packed import Gaps, Strides
from mpicomm.collectives.patterns import shard_count
from mpicomm.collectives.wire import BLOCK
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.team import LANES, MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.arguments import Span

# A call fills in two ranges of `PacketArguments`: the tags with the messages and the steps after them; the inboxes.
_AT_TAGS: int = kernels.PacketArguments.team.offset + Team.tags.offset
_AT_INBOXES: int = kernels.PacketArguments.stages.offset
_pack_pair = struct.Struct("<IQQQQ").pack

Index = Callable[[Span | None], int]
"""Returns the index of a place's address, or of its length, in the values of a call; 0 for no data."""
Kernel = tuple[Any, ...]
"""A kernel of one form: its `Protocol`, its `Steps`, and the options of its epilogue."""


class PacketLauncher(KernelTemplate, FormLauncher):
    """Carries out the calls of a ``form`` in one exchange, or with ``two_shot`` in two exchanges.

    In the second exchange ranks send on the data that they have reduced or received. If it ``finishes``, the kernel
    applies the epilogue to the result.

    The values of a call are 0; the lengths of all blocks, or of the shards; the addresses of all blocks, or of the
    shards of each block. Lengths are in bytes, and a place without bytes has address 0.
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
    ) -> None:
        self.fewest, self.most = bounds
        self.finishes = finishes
        self.moves_gaps = not two_shot
        self.early = domain.early
        row_nbytes = form.epilogue.row_nbytes if finishes and form.epilogue else 0
        self._whole = BLOCK if form.wire else row_nbytes // form.itemsize
        self._itemsize = form.itemsize
        self._shards = form.size - bool(form.operation.rooted) if two_shot else 0  # a root has no shard
        self._config_of, self._memory_for = configs
        self._is_private = form.is_private
        self._unmade: Callable[[], None] | None = partial(self._make, form, domain)
        """Makes the arguments, before the first call: most forms use one or two of their launchers."""

    def _make(self, form: Form, domain: Domain) -> None:
        shards, blocks = self._shards, form.sends + form.receives
        exchange, fan_out = form.two_shot if shards else (form.one_shot, None)
        mine, sent = exchange.reduction, {span for span in exchange.sends if span is not None}
        own = None if mine is None else mine.own
        self._rank, self._size, self._host_slots = domain.rank, domain.size, domain.host_slots
        self._reduction, self._wire_format = form.reduction, wire_format_of(form)
        self._same_to_all = fan_out is None and len(sent) == 1 and (mine is None or own in sent)
        self._fans = fan_out is not None
        self._make_arguments(form, domain, exchange)

        def address(span: Span | None) -> int:
            block, shard = form.piece(span, own)
            if block < 0:
                return 0
            return 1 + (1 + block) * shards + shard if shards else 1 + blocks + block

        def length(span: Span | None) -> int:
            block, shard = form.piece(span, own)
            return 1 + (shard if shards else block)

        self._pairs = pairs = _pairs(exchange, self._rank, length)
        # A call makes one tag for each different pair. ``tags`` has the index of the tag for each peer. This rank does
        # not compare its tag for itself.
        pairs = [*pairs[: self._rank], pairs[self._rank - 1], *pairs[self._rank + 1 :]]
        number, different = 1 + (1 + blocks) * shards if shards else 1 + 2 * blocks, list(dict.fromkeys(pairs))
        self._has_one_tag = self._fans or form.operation.is_even  # then the tag of a call implies all lengths
        self._tagged = [] if self._has_one_tag else different
        tags = [number if self._has_one_tag else number + different.index(each) for each in pairs]
        self._set_fields(exchange, fan_out, tags, address, length)
        self._unmade = None

    def _make_arguments(self, form: Form, domain: Domain, exchange: Exchange) -> None:
        size, own, layout = domain.size, domain.team.arenas[domain.rank], domain.arena.layout
        given = {"team": domain.team, "ll": layout.ll_inboxes(own), "fences": own + layout.fences}
        self._options: tuple[str, ...] = ()
        self._is_strided = any(form.gaps)
        if self._is_strided:
            self.arguments = strided = kernels.StridedPacketArguments(**given)
            firsts, regions = dict[Gaps, int](), list[Strides]()
            ends = (strided.send_gaps, exchange.sends), (strided.receive_gaps, exchange.receives)
            for fields, spans in ends:
                for peer, each in enumerate(map(form.gaps_of, spans)):
                    if each is not None:
                        if each not in firsts:  # ranks that get the same data have the same gaps
                            firsts[each] = len(regions)
                            regions += each.regions
                        fields[peer] = firsts[each], each.grain
            strided.strides[: len(regions)] = regions
        elif self.finishes and form.epilogue is not None:
            self._options, finish = form.epilogue.fused(0)
            self.arguments = kernels.finished_packet_arguments(type(finish))(**given, finish=finish)
        else:
            self.arguments = kernels.PacketArguments(**given)
        words, absent = f"{size}Q", f"{8 * (MAX_RANKS - size)}x"
        self._messages = struct.Struct(f"={size}I{4 * (MAX_RANKS - size)}x{4 * (words + absent)}3Q5I")
        self._inboxes = struct.Struct(f"=I{words}{absent}Q")
        self._filled_inboxes: Inboxes | None = None
        self._cut: tuple[int, PacketConfig | None, int, int] = 0, None, 0, 0
        """The last arguments of `_steps`, and its result."""

    def _set_fields(
        self, exchange: Exchange, fan_out: Exchange | None, tags: list[int], address: Index, length: Index
    ) -> None:
        """Set which values the fields of messages and of the result take, and the ranks at their other end."""
        rank, mine = self._rank, exchange.reduction
        sends, receives = list(exchange.sends), list((fan_out or exchange).receives)
        if self._fans or receives[rank] is None or (receives[rank] == sends[rank] and self._wire_format is None):
            sends[rank] = receives[rank] = None  # nothing to copy; quantized elements change even in place
        measured, own, output = [*sends, *receives], None, None
        self._sources = 0
        self._targets = (
            0 if fan_out is None else sum(1 << r for r, span in enumerate(fan_out.sends) if span is not None)
        )
        if mine is not None:
            self._sources = sum(1 << source for source in mine.sources)
            own, output = mine.own, mine.output
        elif self._reduction is not None or fan_out is None:
            self._targets = 0
        else:
            taken = [source for source, span in enumerate(exchange.receives) if span is not None]
            if taken:
                self._sources, output = 1 << taken[0], exchange.receives[taken[0]]
            else:
                # This rank is the source. It needs no data back, so its receives stay at address 0, where the kernel
                # stores nothing. The relays' packets only show this rank how far they are.
                measured, self._targets = [*sends, *sends], 0
        messages = [*tags, *map(address, (*sends, *receives)), *map(length, measured)]
        # They pick the fields from a list of the values, followed by the tags.
        self._pick: Callable[[list[int]], tuple[int, ...]]
        self._pick_idle: Callable[[list[int]], tuple[int, ...]]
        self._pick = itemgetter(*messages, address(own), address(output), length(output))
        self._pick_idle = itemgetter(*messages, 0, 0, 0)
        self._reduces, self._output_nbytes = mine is not None, length(output)

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        return self._memory_for(self._longest_shard(longest) if self._shards else longest)

    def fill(self, numbers: Numbers) -> Filled | None:
        lengths, begins, longest, hash32, _, finish = numbers
        if self._unmade is not None:
            self._unmade()
        if self.finishes and finish is not None:
            self._options, self.arguments.finish = finish.fused(begins[-1], self._shards or 1)
        if self._shards:
            return self._fill_shards(lengths[0], begins, hash32)
        config = self._config_of(longest)
        if config is None:
            return None
        nbytes = config.row_nbytes or longest
        if self._is_private and longest > config.step_nbytes:
            nbytes = ANY_NBYTES  # short messages have the launch of the config, whatever other ranks send
        return self._write([0, *lengths, *begins], longest, nbytes, hash32, config)

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
        return self._write(values, longest, config.row_nbytes or longest, hash32, config)

    def _longest_shard(self, nbytes: int) -> int:
        count = shard_count(nbytes // self._itemsize, self._shards, self._itemsize, self._whole)
        return min(nbytes, count * self._itemsize)

    def _write(self, values: list[int], longest: int, nbytes: int, tag: int, config: PacketConfig) -> Filled:
        """Write a call into `arguments`. This changes ``values``.

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
            # each way, and the hash of their blocks. A packet that no rank takes would stay in its slot, and a later
            # call would take it as its own data.
            for low, low_hash, high, high_hash in self._tagged:
                values.append(crc32(_pack_pair(tag, values[low], low_hash, values[high], high_hash)))
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
        (protocol, steps, *epilogue), wire_format, reduction = kernel, self._wire_format, self._reduction
        wire: tuple[str, ...] = ()
        if wire_format is not None:
            wire = kernels.wire_options(
                wire_format.dtype,
                moves=reduction is None,
                quantizes_result=wire_format.quantizes_result,
                same_to_all=self._same_to_all,
            )
            reduction = reduction or (wire_format.element, "sum")
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
        if self._wire_format is not None:
            units = -(-units // LANES) * LANES
        steps = -(-units // (config.blocks * config.workers)) or 1
        laps = steps if units <= config.slots else config.laps
        if steps > laps and (laps < kernels.FEWEST_LAPS + (config.row_nbytes > 0) or config.protocol == "ll"):
            raise InvalidUsageError(f"{nbytes} bytes to one rank do not fit into {config.inboxes.nbytes} bytes")
        return steps, laps

    def _paced(self, values: list[int], inbox_nbytes: int) -> int:
        """Return the peers, as bits, with a message longer than an inbox and different lengths each way."""
        paced = 0
        for peer, (low, _, high, _) in enumerate(self._pairs):
            one, other = values[low], values[high]
            if one != other and peer != self._rank and max(one, other) > inbox_nbytes:
                paced |= 1 << peer
        return paced


def _pairs(exchange: Exchange, rank: int, length: Index) -> list[tuple[int, int, int, int]]:
    """Return for each peer the lengths of the data from the lower rank and from the higher rank, each with its hash.

    So both ranks of a pair make the same tag of them.
    """
    mine, taken, pairs = exchange.reduction, list(exchange.receives), []
    if mine is not None:
        for source in mine.sources:
            taken[source] = mine.output
    for peer, (sent, received) in enumerate(zip(exchange.sends, taken, strict=True)):
        sent_hash, received_hash = exchange.block_hashes[peer] if exchange.block_hashes else (0, 0)
        out, back = (length(sent), sent_hash), (length(received), received_hash)
        pairs.append((*out, *back) if rank < peer else (*back, *out))
    return pairs


def serve_one_shot(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """All data goes straight to the ranks that need it."""
    if domain.size == 1:
        return "there is one rank"
    if form.is_private:
        return "only two ranks know the length of a message"
    operation = form.operation
    limits = limits_of(form.reduction, domain, to_all=operation.to_all)
    if domain.size == 2 and "blocks" in (operation.send, operation.receive):
        # Packets take up to 3 % longer than chunks for long messages of a Gather or a Scatter (H200s). But chunks need
        # blocks with gaps packed, which takes up to half as long again, and perhaps only the root has gaps.
        limits = limits._replace(sentinel=inf)
    return _launchers(form, domain, limits, two_shot=False)


def serve_two_shot(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """Each rank reduces or receives a shard. In the same kernel it sends the shard on to all ranks that need it."""
    if form.wire is not None and not form.wire[0].quantizes_result:
        return f'it does not support wire_dtype="{form.wire[0]}"'
    if domain.size == 1:
        return []
    return _launchers(form, domain, limits_of(form.reduction, domain, to_all=True), two_shot=True)


def serve_any_length(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """All data goes straight to the ranks that need it, in messages of any length in the inboxes of the arena.

    The kernel is the same for short and long messages. So it can carry calls in which only the two ranks of a message
    know its length. With two kernels, ranks in one kernel would wait for ranks in the other kernel.
    """
    if domain.size == 1:
        return "there is one rank"
    if not form.is_private:
        return "all ranks know the lengths of all messages"
    return [in_arena(form, domain)]


def _launchers(form: Form, domain: Domain, limits: ProtocolLimits, *, two_shot: bool) -> list[FormLauncher]:
    """Return the launcher for calls of a form, and one that also applies its epilogue."""
    most = inf if form.wire else max(limits)
    configs = sized_configs(limits, domain, fan_out=two_shot, wire_format=wire_format_of(form))
    if form.epilogue is None:
        return [PacketLauncher(form, domain, configs, (1, most), two_shot=two_shot)]
    row_nbytes, shards = form.epilogue.row_nbytes, domain.size if two_shot else 1
    fewest = row_nbytes and row_nbytes * fewest_rows(row_nbytes, domain.most_blocks, shards)
    made: list[FormLauncher] = []
    if fewest > 1:
        made.append(PacketLauncher(form, domain, configs, (1, fewest - 1), two_shot=two_shot))
    if fewest < inf:
        if row_nbytes:
            configs = row_configs(row_nbytes, domain, fan_out=two_shot)
        made.append(PacketLauncher(form, domain, configs, (max(1, fewest), most), two_shot=two_shot, finishes=True))
    return made


def in_arena(form: Form, domain: Domain) -> FormLauncher:
    """Return a launcher for messages of any length that needs no memory but the arena."""
    config = any_length_config(domain, wire_format_of(form))
    return PacketLauncher(form, domain, Configs(lambda nbytes: config), (0, inf))
