"""Messages along a chain of ranks, as launches of chain.cu."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpicomm.collectives.exchange import Chain
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.chain.arguments import (
    BATCH_NBYTES,
    CHAIN_SLOTS,
    CHAIN_THREADS,
    ChainArguments,
    Place,
    chain_kernel,
)
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Request
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import Reduction
from mpicomm.kernels.team import LANES, Team
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
        if not call.operation.reduces or (b.root in (0, b.size - 1) and b.op != "avg" and not is_narrow(b.dtype)):
            return None
        return (
            "it is for the first or the last rank as root, and for types and operations that are not reduced in a "
            "wider type (of float16, bfloat16, float8, and avg)"
        )

    def memory(self, call: GpuCall, node: Node) -> Sequence[Request]:
        """See `Algorithm`."""
        return (_request(self._layout(call, node)),)

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        layout = self._layout(call, node)
        region = node.arena.region(_request(layout))
        layout = replace(layout, channel_nbytes=region.slots_nbytes // layout.channels)
        yield ChainPlanner.of(node).launch(_chain(call), call.reduction, call.tag(), layout, region.pointers)

    def _layout(self, call: GpuCall, node: Node) -> ChannelMemory:
        chain = _chain(call)
        return ChainPlanner.of(node).layout(chain.nbytes, chain.hops)


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
        rank, size = self._team.rank, self._team.size
        nbytes = chain.nbytes
        blocks, batch_nbytes = self._cut(nbytes, chain.hops)
        slot_nbytes = layout.channel_nbytes // CHAIN_SLOTS
        arguments = ChainArguments(
            team=self._team,
            nbytes=nbytes,
            batch_nbytes=batch_nbytes,
            credits=layout.credits,
            flags=layout.flags,
            slots=layout.slots,
            slot_nbytes=slot_nbytes,
            batches=slot_nbytes // BATCH_NBYTES,
            channels=layout.channels,
            blocks=blocks,
            previous=(rank - 1) % size,
            next=(rank + 1) % size,
            tag=tag,
        )
        arguments.memory[: len(memory)] = memory
        for number, station in enumerate(chain.stations):
            own, output = (span.pointer if span else 0 for span in (station.own, station.output))
            arguments.places[number] = Place(own, output, station.receives, station.sends)
        return Launch(
            chain_kernel(reduction, host_slots=self._host_slots),
            arguments,
            blocks=blocks * len(chain.stations),
            threads=CHAIN_THREADS,
            early=self._early,
        )

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
