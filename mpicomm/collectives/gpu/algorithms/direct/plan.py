"""Exchanges that store straight into symmetric memory of the peers, as launches of direct.cu."""

from __future__ import annotations

from collections.abc import Iterator

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Algorithm, GpuCall, Node
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.landing import landing_place
from mpicomm.collectives.gpu.algorithms.direct.arguments import DIRECT_THREADS, Cut, DirectArguments, direct_kernel
from mpicomm.collectives.gpu.algorithms.form import Form
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.gpu.algorithms.steps import Launch, Step
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.team import Team
from mpicomm.symmetric.registry import Mapped

MAX_BLOCKS = 128
"""All blocks of a launch must run at once; an H200 has 132 multiprocessors."""
_FEWEST_THREADS = 64  # one thread for each rank, and one thread that checks the health of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256


class IntoMemory(Algorithm):
    """Every rank stores its data straight into the symmetric output of its peers, between two barriers."""

    name = "one_shot"
    into_memory = True

    def serves(self, operation: Operation) -> bool:
        """See `Algorithm`."""
        return operation.into_all and not operation.reduces

    def takes(self, form: Form) -> bool:
        """See `Algorithm`."""
        return False  # the output of a form is not symmetric memory

    def accepts(self, call: GpuCall, node: Node) -> str | None:
        """See `Algorithm`."""
        if call.memory is None:
            return "the output is not symmetric memory on all ranks"
        if node.size == 1:
            return "there is one rank"
        most_copied = most_copied_nbytes(call.operation, node)
        return None if call.one_shot.longest_nbytes > most_copied else "packets are faster for so few bytes"

    def plan(self, call: GpuCall, node: Node) -> Iterator[Step]:
        """See `Algorithm`."""
        assert call.memory is not None
        exchange, tag = call.one_shot, call.tag(into_memory=True)
        yield DirectPlanner.of(node).launch(exchange, call.memory, tag, nbytes=exchange.longest_nbytes)


def most_copied_nbytes(operation: Operation, node: Node) -> float:
    """Return the most bytes of one message that packets carry, also into symmetric output."""
    most_copied = _most_copied_nbytes(node.size) * node.link_speed
    if operation.traffic == "one-way":  # packets refuse longer messages of such calls
        return min(most_copied, node.arena.layout.most_inbox_nbytes)
    return most_copied


def _most_copied_nbytes(size: int) -> int:
    """Return the most bytes for which packets are faster, although a rank copies their data out of its inboxes.

    Packets save two barriers. Their other costs grow with the bytes that a rank sends, and with the number of ranks
    that send to it at once.
    """
    return 76 << 20 if size == 2 else (36 << 20) // (size - 1) ** 2


class DirectPlanner:
    """Makes launches of exchanges. Every kernel of this rank gets ``team``."""

    def __init__(self, team: Team, layout: ArenaLayout, most_blocks: int, *, early: bool = True) -> None:
        self._team = team
        self._layout = layout
        self._most_blocks = most_blocks
        self._early = early

    @classmethod
    def of(cls, node: Node) -> DirectPlanner:
        """Return the planner for this rank of a node."""
        return cls(node.team, node.arena.layout, min(MAX_BLOCKS, node.multiprocessors), early=node.early)

    def launch(self, exchange: Exchange, memory: Mapped, tag: int, *, nbytes: int) -> Launch:
        """Return the launch for an exchange into symmetric ``memory``; a message has at most ``nbytes``."""
        rank, itemsize = self._team.rank, exchange.dtype.itemsize
        arguments = self._arguments(tag)
        blocks, threads = self._geometry(-(-nbytes // PACKET_NBYTES))
        for peer in range(self._team.size):
            send, receive = exchange.sends[peer], exchange.receives[peer]
            target = 0
            if peer == rank:
                target = receive.pointer if receive is not None else 0
            elif send is not None and send.count:
                target = landing_place(exchange, peer, memory, memory.pointers[rank])
            if send is not None and send.count and target not in (0, send.pointer):
                arguments.sends[peer], arguments.targets[peer] = send.pointer, target
                arguments.going[peer] = Cut.of(send.count * itemsize, blocks)
            if receive is not None and peer != rank and receive.count:
                arguments.coming[peer] = Cut.of(receive.count * itemsize, blocks)
        return Launch(direct_kernel(), arguments, blocks=blocks, threads=threads, early=self._early)

    def barrier(self, tag: int, *, after_copies: bool) -> Launch:
        """Return a launch that ends when all earlier work of all ranks has ended.

        With ``after_copies``, copies may precede it on the stream, so its blocks are not set up early.
        """
        early = self._early and not after_copies
        return Launch(direct_kernel(), self._arguments(tag), blocks=1, threads=_FEWEST_THREADS, early=early)

    def _arguments(self, tag: int) -> DirectArguments:
        flagged = self._layout.flagged_inboxes(self._team.arenas[self._team.rank])
        arguments = DirectArguments(team=self._team, arrivals=self._layout.arrivals, flagged=flagged)
        arguments.team.tags[:] = [tag] * len(arguments.team.tags)
        return arguments

    def _geometry(self, packets: int) -> tuple[int, int]:
        """Return the blocks and threads for ``packets`` from one rank to another; the same on all ranks."""
        threads = _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        return max(1, min(self._most_blocks, -(-packets // threads))), threads
