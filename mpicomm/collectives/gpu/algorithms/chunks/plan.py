"""Exchanges of messages of any size and kind as launches of exchange.cu."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Algorithm, Filled, GpuCall, Node, Template, moved
from mpicomm.collectives.gpu.algorithms.chunks.arguments import (
    PACKET_NBYTES,
    THREADS,
    ExchangeArguments,
    exchange_kernel,
)
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import ring_refusal
from mpicomm.kernels.reductions import Reduction, reduction_of
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.span import Span
from mpicomm.symmetric.registry import Mapped

CHANNEL_NBYTES = 8 * 1024
"""The bytes of a message for each block: a message with more bytes gets another block."""
_STRIDE_NBYTES = 128  # each channel's part begins at a whole cache line of the message, hence at an element
_FEWEST_THREADS = 64  # the kernel needs two warps
_AT_SENDS: int = ExchangeArguments.sends.offset
_AT_SOURCES: int = ExchangeArguments.num_sources.offset
_pack_sources = struct.Struct(f"={1 + MAX_RANKS}I").pack_into
_pack_call = struct.Struct("<IIQ").pack
_NO_LINK = 0, 0, 0, 0, 0
Place = tuple[int, int]
"""An address and a number of bytes."""


class ChunkTemplate:
    """A `Template` of exchange.cu. Every kernel of this rank gets ``team``.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between. `launch` returns a launch with separate arguments.
    """

    early = False

    def __init__(self, team: Team, layout: ArenaLayout) -> None:
        self._layout = layout
        self._rank, self._size = int(team.rank), int(team.size)
        self.arguments = ExchangeArguments(
            team=team,
            counts=layout.counts,
            credits=layout.credits,
            flags=layout.flags,
            channels=layout.channels,
            slot_nbytes=layout.slot_nbytes,
        )
        links = f"{'3Q2I' * self._size}{32 * (MAX_RANKS - self._size)}x"
        self._fields = struct.Struct(f"={links}{links}2Q")

    def prepare(self, slots: Sequence[int], sources: Sequence[int]) -> None:
        """Write the address of each rank's slots, and the ranks with data that this rank reduces, in order."""
        self.arguments.slots[: len(slots)] = slots
        absent = [0] * (MAX_RANKS - len(sources))
        _pack_sources(self.arguments, _AT_SOURCES, len(sources), *sources, *absent)

    def write(
        self, sends: Sequence[Place], receives: Sequence[Place], own: int, output: int, call: tuple[int, int]
    ) -> tuple[int, int]:
        """Write a call with any bytes into `arguments`; return its blocks and threads.

        The items of ``sends`` and ``receives`` are the messages to each rank and from each rank. A message that this
        rank reduces has address 0. ``own`` and ``output`` are the addresses of this rank's contribution and of the
        result. ``call`` is the hash of the call and the number of the exchange.
        """
        channels, links, blocks, longest = self._layout.channels, {0: _NO_LINK}, 0, 0
        for nbytes in {nbytes for _, nbytes in (*sends, *receives)} - {0}:
            # The cut depends only on the bytes and the arena, because both ranks must cut alike.
            stride = stride_of(nbytes, min(channels, -(-nbytes // CHANNEL_NBYTES)))
            # The tag includes the bytes, so that two ranks notice different counts, which MPI lets them pass.
            links[nbytes] = 0, nbytes, stride, zlib.crc32(_pack_call(*call, nbytes)), 0
            # Both ranks of a pair use the same blocks, but each rank may choose its number of threads.
            blocks, longest = max(blocks, -(-nbytes // stride)), max(longest, stride)
        fields = chain.from_iterable((at, *links[nbytes][1:]) for at, nbytes in (*sends, *receives))
        self._fields.pack_into(self.arguments, _AT_SENDS, *fields, own, output)
        return blocks, threads_for(min(longest, self._layout.slot_nbytes), THREADS)

    def variant(self, kernel: Reduction | None) -> Variant:
        return exchange_kernel(kernel)

    def launch(self, exchange: Exchange, call: tuple[int, int], slots: Sequence[int]) -> Launch | None:
        """Return the launch for an exchange; None if this rank has nothing to send, receive or reduce.

        ``call`` is the hash of the call and the number of the exchange. ``slots`` has the address of each rank's slots.
        """
        exchange, itemsize = _as_launched(exchange, self._rank), exchange.dtype.itemsize
        sends, receives = (
            [(0, 0) if span is None or span.count == 0 else (span.pointer, span.count * itemsize) for span in spans]
            for spans in (exchange.sends, exchange.receives)
        )
        if not any(nbytes for _, nbytes in (*sends, *receives)):
            return None
        own = output = 0
        kernel, reduction = None, exchange.reduction
        if reduction is not None:
            own, output = reduction.own.pointer if reduction.own else 0, reduction.output.pointer
            kernel = reduction_of(exchange.dtype, reduction.op)
        self.prepare(slots, reduction.sources if reduction else ())
        blocks, threads = self.write(sends, receives, own, output, call)
        return Launch(self.variant(kernel), ExchangeArguments.from_buffer_copy(self.arguments), blocks, threads)


class ChunkCalls(ChunkTemplate):
    """An `EvenTemplate`: the calls of a form with equal blocks, in one exchange."""

    def __init__(self, form: Form, node: Node) -> None:
        super().__init__(node.team, node.arena.layout)
        self._arena = node.arena
        self._has_slots = False
        exchange = _as_launched(form.one_shot, node.rank)
        reduction = exchange.reduction
        self._sources = () if reduction is None else reduction.sources
        self._kernel = None if reduction is None else form.reduction

        def place(span: Span | None) -> tuple[int, int, bool]:
            """Return the buffer of a span, the number of the block there, and whether the span has bytes."""
            buffer, part = form.piece(span)
            return (buffer, part, True) if buffer else (0, 0, span is not None)

        self._sends, self._receives = [*map(place, exchange.sends)], [*map(place, exchange.receives)]
        self._ends = [place(reduction.own if reduction else None), place(reduction.output if reduction else None)]

    def fill(self, send: int, receive: int, nbytes: int, hash32: int, memory: Mapped | None) -> Filled | None:
        if not self._has_slots:
            request = slots_of(self._layout)
            if not self._arena.has(request):
                return None  # the ranks set up memory when they plan a call
            self.prepare(self._arena.region(request).pointers, self._sources)
            self._has_slots = True
        buffers = 0, send, receive
        sends, receives, ((own, _), (output, _)) = (
            [(buffers[buffer] + part * nbytes, nbytes if some else 0) for buffer, part, some in places]
            for places in (self._sends, self._receives, self._ends)
        )
        return self._kernel, *self.write(sends, receives, own, output, (hash32, 0))


def _as_launched(exchange: Exchange, rank: int) -> Exchange:
    """Return an exchange of a rank as the kernel carries it out.

    It has no message from a rank to itself if there is nothing to copy. Data that the rank reduces is a message without
    an address.
    """
    sends, receives, reduction = list(exchange.sends), list(exchange.receives), exchange.reduction
    if reduction is not None and len(reduction.sources) == 1:
        # The result is the data of the one source.
        (source,) = reduction.sources
        receives[source] = reduction.output
        if source == rank:
            sends[rank] = reduction.own
        reduction = None
    if reduction is not None and reduction.output.count == 0:
        reduction = None
    if receives[rank] is None or receives[rank] == sends[rank]:
        sends[rank] = receives[rank] = None  # nothing to copy
    if reduction is not None:
        for source in reduction.sources:
            receives[source] = Span(0, reduction.output.count)
    return replace(exchange, sends=tuple(sends), receives=tuple(receives), reduction=reduction)


def slots_of(layout: ArenaLayout) -> Request:
    """Return the request for slots of all channels."""
    return Request("collectives: slots", layout.slots_nbytes)


def stride_of(nbytes: int, channels: int) -> int:
    """Return the bytes of a message that each channel carries; the last channel may carry fewer."""
    return -(-nbytes // (channels * _STRIDE_NBYTES)) * _STRIDE_NBYTES


def threads_for(nbytes: int, most: int) -> int:
    """Return the threads that move ``nbytes``, one packet each: a power of two, up to ``most``."""
    packets = -(-nbytes // PACKET_NBYTES)
    return min(most, max(_FEWEST_THREADS, 1 << (packets - 1).bit_length()))


class ChunkedOneShot(Algorithm):
    """Ranks exchange data of any size and kind in chunks. This algorithm accepts every call."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        return True

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        return (slots_of(node.arena.layout),) if call.one_shot.longest_nbytes else ()

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        if call.one_shot.longest_nbytes:
            yield from _launched(call, node, [call.one_shot])
            yield from moved(call.one_shot)

    def template(self, form: Form, node: Node) -> Template | None:
        return ChunkCalls(form, node) if form.is_even else None


class Ring(Algorithm):
    """Each rank sends chunks only to the next rank. A reduction follows the order of the ring, not of the ranks."""

    name = "ring"
    in_rank_order = False

    def serves(self, operation: Operation) -> bool:
        return operation.ring is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        return ring_refusal(call.buffers.op)

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        return (slots_of(node.arena.layout),)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        assert call.operation.ring is not None
        return _launched(call, node, call.operation.ring(call.buffers))


def _launched(call: GpuCall, node: Node, exchanges: Sequence[Exchange]) -> Iterator[Launch]:
    template, slots = ChunkTemplate(node.team, node.arena.layout), node.arena.region(slots_of(node.arena.layout))
    for step, exchange in enumerate(exchanges):
        launch = template.launch(exchange, (call.hash32, step), slots.pointers)
        if launch is not None:
            yield launch
