"""Exchanges of messages of any size and kind as launches of exchange.cu."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence

from mpicomm.collectives.exchange import Exchange, Reduction
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node, moved
from mpicomm.collectives.gpu.algorithms.chunks.arguments import (
    PACKET_NBYTES,
    THREADS,
    ChunkLink,
    ExchangeArguments,
    exchange_kernel,
)
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.collectives.patterns import ring_refusal
from mpicomm.kernels.reductions import reduction_of
from mpicomm.kernels.team import Team
from mpicomm.mpi.span import Span

CHANNEL_NBYTES = 8 * 1024
"""The bytes of a message for each block: a message with more bytes gets another block."""
_STRIDE_NBYTES = 128  # each channel's part begins at a whole cache line of the message, hence at an element
_FEWEST_THREADS = 64  # the kernel needs two warps


class ChunkedOneShot(Algorithm):
    """Ranks exchange data of any size and kind in chunks. This algorithm accepts every call."""

    name = "one_shot"

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return True

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return (slots_of(node.arena.layout),) if call.one_shot.longest_nbytes else ()

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        if call.one_shot.longest_nbytes:
            yield from _launched(call, node, [call.one_shot])
            yield from moved(call.one_shot)


class Ring(Algorithm):
    """Each rank sends chunks only to the next rank. A reduction follows the order of the ring, not of the ranks."""

    name = "ring"
    in_rank_order = False

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.ring is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        return ring_refusal(call.buffers.op)

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return (slots_of(node.arena.layout),)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        assert call.operation.ring is not None
        return _launched(call, node, call.operation.ring(call.buffers))


def slots_of(layout: ArenaLayout) -> Request:
    """Return the request for slots of all channels."""
    return Request("collectives: slots", layout.slots_nbytes)


def _launched(call: GpuCall, node: Node, exchanges: Sequence[Exchange]) -> Iterator[Launch]:
    planner, slots = ChannelPlanner(node.team, node.arena.layout), node.arena.region(slots_of(node.arena.layout))
    for step, exchange in enumerate(exchanges):
        launch = planner.launch(exchange, (call.signature.hash32, step), slots.pointers)
        if launch is not None:
            yield launch


class ChannelPlanner:
    """Makes launches of exchanges. Every kernel of this rank gets ``team``."""

    def __init__(self, team: Team, layout: ArenaLayout) -> None:
        self._team = team
        self._layout = layout
        self._template = bytes(
            ExchangeArguments(
                team=team,
                counts=layout.counts,
                credits=layout.credits,
                flags=layout.flags,
                channels=layout.channels,
                slot_nbytes=layout.slot_nbytes,
            )
        )

    def launch(self, exchange: Exchange, call: tuple[int, int], slots: Sequence[int]) -> Launch | None:
        """Return the launch for an exchange; None if this rank has nothing to send, receive or reduce.

        ``call`` is the hash of the call and the number of the exchange. ``slots`` has the address of each rank's slots.
        """
        rank, itemsize = self._team.rank, exchange.dtype.itemsize
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

        arguments = ExchangeArguments.from_buffer_copy(self._template)
        arguments.slots[: len(slots)] = slots
        for peer in range(self._team.size):
            self._fill(arguments.sends[peer], sends[peer], itemsize, call)
            self._fill(arguments.receives[peer], receives[peer], itemsize, call)
        if reduction is not None:
            self._fill_reduction(arguments, reduction, itemsize, call)
        links = [*arguments.sends, *arguments.receives]
        longest = max(link.stride for link in links)
        if longest == 0:
            return None
        # Both ranks of a pair use the same blocks, but each rank may choose its number of threads.
        return Launch(
            exchange_kernel(reduction_of(exchange.dtype, reduction.op) if reduction else None),
            arguments,
            blocks=max(-(-link.nbytes // link.stride) for link in links if link.nbytes),
            threads=threads_for(min(longest, self._layout.slot_nbytes), THREADS),
        )

    def _fill(
        self, link: ChunkLink, span: Span | None, itemsize: int, call: tuple[int, int], *, reduced: bool = False
    ) -> None:
        if span is None or span.count == 0:
            return
        link.pointer = 0 if reduced else span.pointer
        link.nbytes = nbytes = span.count * itemsize
        # The cut depends only on the bytes and the arena, because both ranks must cut alike.
        link.stride = stride_of(nbytes, min(self._layout.channels, -(-nbytes // CHANNEL_NBYTES)))
        # The tag includes the bytes, so that two ranks notice different counts, which MPI lets them pass.
        link.tag = zlib.crc32(struct.pack("<IIQ", *call, nbytes))

    def _fill_reduction(
        self, arguments: ExchangeArguments, reduction: Reduction, itemsize: int, call: tuple[int, int]
    ) -> None:
        for place, source in enumerate(reduction.sources):
            self._fill(arguments.receives[source], reduction.output, itemsize, call, reduced=True)
            arguments.sources[place] = source
        arguments.num_sources = len(reduction.sources)
        arguments.output = reduction.output.pointer
        arguments.own = reduction.own.pointer if reduction.own else 0


def stride_of(nbytes: int, channels: int) -> int:
    """Return the bytes of a message that each channel carries; the last channel may carry fewer."""
    return -(-nbytes // (channels * _STRIDE_NBYTES)) * _STRIDE_NBYTES


def threads_for(nbytes: int, most: int) -> int:
    """Return the threads that move ``nbytes``, one packet each: a power of two, up to ``most``."""
    packets = -(-nbytes // PACKET_NBYTES)
    return min(most, max(_FEWEST_THREADS, 1 << (packets - 1).bit_length()))
