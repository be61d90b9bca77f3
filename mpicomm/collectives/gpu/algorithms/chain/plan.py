"""Messages along a chain of ranks, as launches of chain.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import Chain
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.chain.arguments import (
    BATCH_NBYTES,
    CHAIN_SLOTS,
    CHAIN_THREADS,
    ChainArguments,
    chain_kernel,
)
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, Team
from mpicomm.kernels.variant import Variant
from mpicomm.mpi.types import is_narrow

# Blocks of one launch, as measured on H200s: half of them if a batch would not be full or a rank has two stations.
_MOST_BLOCKS = 128
# A reader gives credit per slot, and credit travels against the data: on H200s smaller slots slow the data down.
_MOST_SLOT_NBYTES = 32 * 1024
_WARPS = CHAIN_THREADS // LANES
_UNIT_NBYTES = LANES * PACKET_NBYTES  # a packet for each lane


class AlongRanks(Algorithm):
    """Each rank sends the data that it receives to the next rank, as it is or reduced with its own data."""

    name = "chain"

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.chain is not None

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`.

        A chain that reduces in rank order ends on the last rank. For a root in the middle everything would travel
        twice. Partial results travel in the type of the elements, which would round narrow types at each rank.
        """
        b = call.buffers
        if _serves(call.operation, b.root, b.size, b.op, b.dtype):
            return None
        return (
            "it is for the first or the last rank as root, and for types and operations that are not reduced in a "
            "wider type (of float16, bfloat16, float8, and avg)"
        )

    def takes(self, form: Form) -> bool:
        """See `Algorithm`."""
        return _serves(form.operation, form.root, form.size, form.op, form.dtype)

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return (_request(self._layout(call, node)),)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        layout = self._layout(call, node)
        region = node.arena.region(_request(layout))
        layout = replace(layout, channel_nbytes=region.slots_nbytes // layout.channels)
        yield ChainPlanner.of(node).launch(_chain(call), call.reduction, call.tag(), layout, region.pointers)

    def template(self, form: Form, node: Node) -> ChainCalls:
        """See `Algorithm`."""
        return ChainCalls(form, node)

    def _layout(self, call: GpuCall, node: Node) -> ChannelMemory:
        chain = _chain(call)
        return ChainPlanner.of(node).layout(chain.nbytes, chain.hops)


class ChainCalls:
    """The calls of a form along the ranks, as launches of chain.cu."""

    def __init__(self, form: Form, node: Node) -> None:
        chain = form.chain
        self._planner = ChainPlanner.of(node)
        self._arena = node.arena
        self._hops = chain.hops
        self._reduction = form.reduction
        self._host_slots = node.host_slots
        self._buffers = [
            (form.piece(station.own).buffer, form.piece(station.output).buffer) for station in chain.stations
        ]
        self.arguments: ChainArguments = self._planner.arguments(chain)
        self.early = node.early

    def fill(self, send: int, receive: int, nbytes: int, hash32: int) -> Filled | None:
        """See `EvenTemplate`."""
        layout = self._planner.layout(nbytes, self._hops)
        request = _request(layout)
        if not self._arena.has(request):
            return None
        region, buffers = self._arena.region(request), (0, send, receive)
        layout = replace(layout, channel_nbytes=region.slots_nbytes // layout.channels)
        places = [(buffers[own], buffers[output]) for own, output in self._buffers]
        blocks = self._planner.fill(self.arguments, places, nbytes, self._hops, hash32, layout, region.pointers)
        return None, blocks, CHAIN_THREADS

    def variant(self, kernel: None) -> Variant:
        """See `Template`."""
        return chain_kernel(self._reduction, host_slots=self._host_slots)


def _serves(operation: Operation, root: int, size: int, op: str, dtype: np.dtype[Any]) -> bool:
    return not operation.reduces or (root in (0, size - 1) and op != "avg" and not is_narrow(dtype))


def _chain(call: GpuCall) -> Chain:
    assert call.operation.chain is not None
    return call.operation.chain(call.buffers)


def _request(layout: ChannelMemory) -> Request:
    slots_nbytes = layout.nbytes - layout.slots
    return Request("collectives: chain", slots_nbytes, words_nbytes=layout.slots, sentinel=True)


class ChainPlanner:
    """Turns chains into launches.

    Every kernel of this rank gets ``team``. Each device has at least ``multiprocessors``. With ``early`` the blocks of
    a kernel may be set up before the kernel ahead of it has ended. ``host_slots`` is whether the ranks' memory lies on
    the host.
    """

    def __init__(self, team: Team, multiprocessors: int, *, early: bool = True, host_slots: bool = False) -> None:
        self._team = team
        self._early = early
        self._host_slots = host_slots
        # A multiprocessor holds two blocks, so the blocks of both stations of a rank run at once.
        self._most_blocks = min(_MOST_BLOCKS, multiprocessors)

    @classmethod
    def of(cls, node: Node) -> ChainPlanner:
        """Return the planner for this rank of a node."""
        return cls(node.team, node.multiprocessors, early=node.early, host_slots=node.host_slots)

    def layout(self, nbytes: int, hops: int) -> ChannelMemory:
        """Return the layout of each rank's memory for a chain of messages of ``nbytes`` over ``hops`` links.

        A slot holds all that one channel carries of a message, up to a limit. All channels lead to one neighbour each
        way. Escapes follow the slots.
        """
        blocks, batch_nbytes = self._cut(nbytes, hops)
        batches = -(-nbytes // (blocks * _WARPS * batch_nbytes))
        slot_nbytes = BATCH_NBYTES
        while slot_nbytes < min(batches * BATCH_NBYTES, _MOST_SLOT_NBYTES):
            slot_nbytes *= 4  # in large steps, because memory of each size stays until the communicator is freed
        return ChannelMemory(1, self._most_blocks * _WARPS, CHAIN_SLOTS * slot_nbytes)

    def launch(
        self,
        chain: Chain,
        reduction: Reduction | None,
        tag: int,
        layout: ChannelMemory,
        memory: Sequence[int],
    ) -> Launch:
        """Return the launch for a ``chain`` of at least one byte between at least two ranks.

        ``memory`` has the address of each rank's memory, of a ``layout`` of this planner. The ranks must agree in
        ``tag``.
        """
        arguments = self.arguments(chain)
        places = [
            ((station.own.pointer if station.own else 0), (station.output.pointer if station.output else 0))
            for station in chain.stations
        ]
        return Launch(
            chain_kernel(reduction, host_slots=self._host_slots),
            arguments,
            blocks=self.fill(arguments, places, chain.nbytes, chain.hops, tag, layout, memory),
            threads=CHAIN_THREADS,
            early=self._early,
        )

    def arguments(self, chain: Chain) -> ChainArguments:
        """Return the arguments of chains of this form, into which `fill` writes each call."""
        rank, size = self._team.rank, self._team.size
        arguments = ChainArguments(team=self._team, previous=(rank - 1) % size, next=(rank + 1) % size)
        for place, station in zip(arguments.places, chain.stations, strict=False):
            place.receives, place.sends = station.receives, station.sends
        return arguments

    def fill(
        self,
        arguments: ChainArguments,
        places: Sequence[tuple[int, int]],
        nbytes: int,
        hops: int,
        tag: int,
        layout: ChannelMemory,
        memory: Sequence[int],
    ) -> int:
        """Write a call into arguments, and return its blocks.

        ``places`` are the addresses of the own data and of the output of each station; for the others see `launch`.
        """
        blocks, batch_nbytes = self._cut(nbytes, hops)
        slot_nbytes = layout.channel_nbytes // CHAIN_SLOTS
        for place, (own, output) in zip(arguments.places, places, strict=False):
            place.own, place.output = own, output
        arguments.nbytes, arguments.batch_nbytes = nbytes, batch_nbytes
        arguments.memory[: len(memory)] = memory
        arguments.credits, arguments.flags, arguments.slots = layout.credits, layout.flags, layout.slots
        arguments.slot_nbytes, arguments.batches = slot_nbytes, slot_nbytes // BATCH_NBYTES
        arguments.channels, arguments.blocks, arguments.tag = layout.channels, blocks, tag
        return blocks * len(places)

    def _cut(self, nbytes: int, hops: int) -> tuple[int, int]:
        """Return the blocks for one station and the size of a batch.

        They are the same on all ranks, because both sides of a channel must cut messages alike. A chain of as many hops
        as ranks comes back to the first rank, which then has two stations.
        """
        half = _MOST_BLOCKS // 2
        wanted = half if hops == self._team.size else max(half, min(_MOST_BLOCKS, nbytes // (_WARPS * BATCH_NBYTES)))
        blocks = min(wanted, self._most_blocks)
        batch_nbytes = min(BATCH_NBYTES, -(-nbytes // (blocks * _WARPS * _UNIT_NBYTES)) * _UNIT_NBYTES)
        return min(blocks, -(-nbytes // batch_nbytes)), batch_nbytes
