"""Exchanges of messages of any size and kind as launches of exchange.cu."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from math import inf
from pathlib import Path

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Filled, Form, FormLauncher, Numbers
from mpicomm.collectives.gpu.algorithms.memory import Domain, Request
from mpicomm.collectives.patterns import Buffers, ring_refusal
from mpicomm.kernels.reductions import options_for, reduction_of
from mpicomm.kernels.team import MAX_RANKS, PACKET_NBYTES, Team
from mpicomm.kernels.variant import Launch, Variant, u32, u64
from mpicomm.mpi.arguments import Span

# Constants and structures of exchange.cu; a test compares them.
THREADS = 512


class ChunkLink(ctypes.Structure):
    """The host's copy of ``Link`` in exchange.cu: the message to, or from, one rank."""

    _fields_ = [*u64("pointer", "nbytes", "stride"), *u32("tag", "unused")]


class ExchangeArguments(ctypes.Structure):
    """The host's copy of ``Exchange`` in exchange.cu."""

    _fields_ = [
        ("team", Team),
        ("sends", ChunkLink * MAX_RANKS),
        ("receives", ChunkLink * MAX_RANKS),
        *u64("own", "output", "counts", "credits", "flags"),
        ("slots", ctypes.c_uint64 * MAX_RANKS),
        *u64("slot_nbytes"),
        *u32("channels", "num_sources"),
        ("sources", ctypes.c_uint32 * MAX_RANKS),
    ]


def exchange_kernel(reduction: tuple[str, str] | None) -> Variant:
    """Return the kernel for ``(dtype, op)``, or the kernel that does not reduce; raises as `options_for`."""
    return Variant(Path(__file__).with_name("exchange.cu"), "mpicomm_exchange", options_for(reduction))


CHANNEL_NBYTES = 8 * 1024
"""The bytes of a message for each block: a message with more bytes gets another block."""
_STRIDE_NBYTES = 128  # each channel's part begins at a whole cache line of the message, hence at an element
_FEWEST_THREADS = 64  # the kernel needs two warps
_AT_SENDS: int = ExchangeArguments.sends.offset
_AT_SOURCES: int = ExchangeArguments.num_sources.offset
_pack_sources = struct.Struct(f"={1 + MAX_RANKS}I").pack_into
_pack_call = struct.Struct("<IIQ").pack


class ChunkLauncher(FormLauncher):
    """Carries out the calls of a form in chunks, as one exchange after the other."""

    def __init__(
        self, form: Form, domain: Domain, exchanges: Callable[[Buffers], Sequence[Exchange]], most: float = inf
    ) -> None:
        self.most = most
        self._form, self._domain, self._exchanges, self._layout = form, domain, exchanges, domain.arena.layout
        self._slots = Request("collectives: slots", self._layout.slots_nbytes)
        """The slots of all channels."""
        links = f"{'3Q2I' * domain.size}{ctypes.sizeof(ChunkLink) * (MAX_RANKS - domain.size)}x"
        self._links = struct.Struct(f"={links}{links}2Q")
        """The messages to and from all ranks, and the two addresses after them."""
        layout = self._layout
        self._arguments = ExchangeArguments(
            team=domain.team,
            counts=layout.counts,
            credits=layout.credits,
            flags=layout.flags,
            channels=layout.channels,
            slot_nbytes=layout.slot_nbytes,
        )

    def memory(self, longest: int, *, symmetric: bool) -> Sequence[Request]:
        # A rank alone has nothing to send in some collectives.
        return (self._slots,) if longest and self._form.one_shot.longest_nbytes else ()

    def fill(self, numbers: Numbers) -> Filled | None:
        lengths, begins, longest, hash32, *_ = numbers
        if not self.memory(longest, symmetric=False):
            return [], 0, 0
        if not self._domain.arena.has(self._slots):
            return None
        slots = self._domain.arena.region(self._slots).pointers
        exchanges = enumerate(self._exchanges(self._form.buffers(lengths, begins)))
        launches = [self._launch(exchange, (hash32, step), slots) for step, exchange in exchanges]
        return [launch for launch in launches if launch is not None], 0, 0

    def _launch(self, exchange: Exchange, call: tuple[int, int], slots: Sequence[int]) -> Launch | None:
        """Return the launch for an exchange; None if this rank has nothing to send, receive or reduce.

        ``call`` is the hash of the call and the number of the exchange. ``slots`` has the address of each rank's slots.
        """
        exchange, itemsize = _as_launched(exchange, self._domain.rank), exchange.dtype.itemsize
        messages = [
            (0, 0) if span is None or span.count == 0 else (span.pointer, span.count * itemsize)
            for span in (*exchange.sends, *exchange.receives)
        ]
        channels, links, blocks, longest = self._layout.channels, {0: (0, 0, 0, 0)}, 0, 0
        for nbytes in {nbytes for _, nbytes in messages} - {0}:
            # The cut depends only on the bytes and the arena, because both ranks must cut in the same way.
            stride = stride_of(nbytes, min(channels, -(-nbytes // CHANNEL_NBYTES)))
            # The tag includes the bytes, so that two ranks notice different counts, which MPI lets them pass.
            links[nbytes] = nbytes, stride, zlib.crc32(_pack_call(*call, nbytes)), 0
            # Both ranks of a pair use the same blocks, but each rank may choose its number of threads.
            blocks, longest = max(blocks, -(-nbytes // stride)), max(longest, stride)
        if not blocks:
            return None
        own = output = 0
        kernel, reduction = None, exchange.reduction
        sources: Sequence[int] = ()
        if reduction is not None:
            own, output, sources = (
                reduction.own.pointer if reduction.own else 0,
                reduction.output.pointer,
                reduction.sources,
            )
            kernel = reduction_of(exchange.dtype, reduction.op)
        arguments = ExchangeArguments.from_buffer_copy(self._arguments)
        arguments.slots[: len(slots)] = slots
        _pack_sources(arguments, _AT_SOURCES, len(sources), *sources, *[0] * (MAX_RANKS - len(sources)))
        fields = chain.from_iterable((pointer, *links[nbytes]) for pointer, nbytes in messages)
        self._links.pack_into(arguments, _AT_SENDS, *fields, own, output)
        return Launch(
            exchange_kernel(kernel), arguments, blocks, threads_for(min(longest, self._layout.slot_nbytes), THREADS)
        )


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


def stride_of(nbytes: int, channels: int) -> int:
    """Return the bytes of a message that each channel carries; the last channel may carry fewer."""
    return -(-nbytes // (channels * _STRIDE_NBYTES)) * _STRIDE_NBYTES


def threads_for(nbytes: int, most: int) -> int:
    """Return the threads that move ``nbytes``, one packet each: a power of two, up to ``most``."""
    packets = -(-nbytes // PACKET_NBYTES)
    return min(most, max(_FEWEST_THREADS, 1 << (packets - 1).bit_length()))


def serve_chunks(form: Form, domain: Domain) -> list[FormLauncher]:
    """Ranks exchange data of any size and kind in chunks: this carries out every call, except quantized ones."""
    # Calls without elements have no launch, also if they are quantized.
    most = inf if form.wire is None else 0
    return [ChunkLauncher(form, domain, lambda buffers: [form.operation.one_shot(buffers)], most)]


def serve_ring(form: Form, domain: Domain) -> list[FormLauncher] | str:
    """Each rank sends chunks only to the next rank. A reduction follows the order of the ring, not of the ranks."""
    assert form.operation.ring is not None
    return ring_refusal(form.op) or [ChunkLauncher(form, domain, form.operation.ring)]
