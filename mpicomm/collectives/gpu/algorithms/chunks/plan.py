"""Exchanges of messages of any size and kind as launches of exchange.cu."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from math import inf

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import NO_CODES, Algorithm, Domain, FormLauncher, StepLauncher
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
from mpicomm.collectives.patterns import Buffers, ring_refusal
from mpicomm.kernels.reductions import reduction_of
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.mpi.arguments import Span
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
    """Launches of exchange.cu. Every kernel of this rank gets ``team``.

    `write` writes one call into `arguments`. The next `write` overwrites it, so a caller launches the kernel in
    between. `launch` returns a launch with separate arguments.
    """

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
        return Launch(exchange_kernel(kernel), ExchangeArguments.from_buffer_copy(self.arguments), blocks, threads)


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


class ChunkLauncher(StepLauncher):
    """Carries out the calls of a form in chunks, as one exchange after the other."""

    def __init__(
        self, form: Form, domain: Domain, exchanges: Callable[[Buffers], Sequence[Exchange]], most: float = inf
    ) -> None:
        super().__init__(form, domain)
        self.most = most
        self._exchanges = exchanges

    @cached_property
    def _template(self) -> ChunkTemplate:
        return ChunkTemplate(self._domain.team, self._domain.arena.layout)

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        # A rank alone has nothing to send in some collectives.
        return (slots_of(self._domain.arena.layout),) if longest and self._form.one_shot.longest_nbytes else ()

    def made(self, buffers: Buffers, hash32: int, memory: Mapped | None) -> list[Step]:
        if not self.memory(buffers.longest, symmetric=memory is not None):
            return []
        arena = self._domain.arena
        slots = arena.region(slots_of(arena.layout)).pointers
        launches = [
            self._template.launch(exchange, (hash32, step), slots)
            for step, exchange in enumerate(self._exchanges(buffers))
        ]
        return [launch for launch in launches if launch is not None]


class ChunkedOneShot(Algorithm):
    """Ranks exchange data of any size and kind in chunks. This algorithm carries out every call, except with codes."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        return True

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        # Calls without elements have no launch, also with codes.
        most = inf if form.wire is None else 0
        return [ChunkLauncher(form, domain, lambda buffers: [form.operation.one_shot(buffers)], most)]


class Ring(Algorithm):
    """Each rank sends chunks only to the next rank. A reduction follows the order of the ring, not of the ranks."""

    name = "ring"
    in_rank_order = False

    def serves(self, operation: Operation) -> bool:
        return operation.ring is not None

    def serve(self, form: Form, domain: Domain) -> Sequence[FormLauncher] | str:
        if form.wire is not None:
            return NO_CODES
        assert form.operation.ring is not None
        return ring_refusal(form.op) or [ChunkLauncher(form, domain, form.operation.ring)]
