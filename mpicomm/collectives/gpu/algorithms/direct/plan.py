"""Exchanges that store straight into symmetric memory of the peers, as launches of direct.cu."""

from __future__ import annotations

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chunks.arguments import PACKET_NBYTES
from mpicomm.collectives.gpu.algorithms.copies.landing import landing_place
from mpicomm.collectives.gpu.algorithms.direct.arguments import DIRECT_THREADS, Cut, DirectArguments, direct_kernel
from mpicomm.collectives.gpu.algorithms.launch import Launch
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.kernels.team import Team
from mpicomm.symmetric.registry import Mapped

_FEWEST_THREADS = 64  # one for each rank, and one that looks at the state of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256


class DirectPlanner:
    """Turns exchanges into launches; ``team`` is what every kernel of this rank is told."""

    def __init__(self, team: Team, layout: ArenaLayout, most_blocks: int, *, early: bool = True) -> None:
        self._team = team
        self._layout = layout
        self._most_blocks = most_blocks
        self._early = early

    def launch(self, exchange: Exchange, memory: Mapped, tag: int, *, nbytes: int) -> Launch:
        """Return the launch for an exchange that moves into ``memory``, at most ``nbytes`` from one rank to another."""
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
        """Return a launch that is over when all that the ranks have enqueued before is."""
        early = self._early and not after_copies
        return Launch(direct_kernel(), self._arguments(tag), blocks=1, threads=_FEWEST_THREADS, early=early)

    def _arguments(self, tag: int) -> DirectArguments:
        flagged = self._layout.flagged_inboxes(self._team.arenas[self._team.rank])
        arguments = DirectArguments(team=self._team, arrivals=self._layout.arrivals, flagged=flagged)
        arguments.team.tags[:] = [tag] * len(arguments.team.tags)
        return arguments

    def _geometry(self, packets: int) -> tuple[int, int]:
        """Return blocks and threads for so many packets from one rank to another; the same on all ranks."""
        threads = _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        return max(1, min(self._most_blocks, -(-packets // threads))), threads
