"""Exchanges that store straight into symmetric memory of the peers, as launches of direct.cu."""

from __future__ import annotations

from mpicomm.collectives.device_arena import ArenaLayout
from mpicomm.collectives.device_landing import landing_place
from mpicomm.collectives.device_launch import Launch
from mpicomm.collectives.exchange import Exchange
from mpicomm.kernels.direct import DIRECT_THREADS, Cut, DirectArguments, direct_kernel
from mpicomm.kernels.exchange import PACKET_NBYTES
from mpicomm.kernels.team import Team
from mpicomm.mappings import Mapped

CHUNK_NBYTES = 11 << 17
"""As measured on H200s: smaller ones cost more waits than they save, and from so many on ones of twice the size do."""
_FEWEST_THREADS = 64  # one for each rank, and one that looks at the state of the team
_MOST_THREADS_FOR_ALL_BLOCKS = 256
_MOST_SMALL_CHUNKS = 16


class DirectPlanner:
    """Turns exchanges into launches; ``team`` is what every kernel of this rank is told.

    ``chunk_nbytes`` is the least that is sent on at once, by all blocks together.
    """

    def __init__(
        self,
        team: Team,
        layout: ArenaLayout,
        most_blocks: int,
        *,
        early: bool = True,
        chunk_nbytes: int = CHUNK_NBYTES,
    ) -> None:
        self._team = team
        self._layout = layout
        self._most_blocks = most_blocks
        self._early = early
        self._chunk_nbytes = chunk_nbytes

    def launch(
        self, exchange: Exchange, memory: Mapped, tag: int, *, nbytes: int, relay: Exchange | None = None
    ) -> Launch:
        """Return the launch for an exchange that moves into ``memory``, at most ``nbytes`` from one rank to another.

        With ``relay``, the next exchange, ranks send on what they receive, chunk by chunk.
        """
        rank, size, itemsize = self._team.rank, self._team.size, exchange.dtype.itemsize
        arguments = self._arguments(tag)
        blocks, threads = self._geometry(-(-nbytes // PACKET_NBYTES))
        chunks = 1
        if relay is not None:  # the more chunks, the sooner a rank can send on, and the more often it waits
            small, large = nbytes // self._chunk_nbytes, nbytes // (2 * self._chunk_nbytes)
            chunks = max(1, min(_MOST_SMALL_CHUNKS, small), large)
        arguments.chunks = chunks
        for each in (exchange, relay) if relay is not None else (exchange,):
            for peer in range(size):
                send, receive = each.sends[peer], each.receives[peer]
                if peer == rank:
                    target = receive.pointer if receive is not None else 0
                elif send is not None and send.count:
                    target = landing_place(each, peer, memory, memory.pointers[rank])
                    arguments.relays |= (each is relay) << peer
                if send is not None and send.count and target not in (0, send.pointer):
                    arguments.sends[peer], arguments.targets[peer] = send.pointer, target
                    arguments.going[peer] = Cut.of(send.count * itemsize, blocks, chunks)
                if receive is not None and peer != rank and receive.count:
                    arguments.coming[peer] = Cut.of(receive.count * itemsize, blocks, chunks)
        if arguments.relays:
            assert relay is not None
            passed_on = next(send for send in relay.sends if send is not None)
            arguments.source = exchange.receives.index(passed_on)
        return Launch(direct_kernel(), arguments, blocks=blocks, threads=threads, early=self._early)

    def barrier(self, tag: int, *, after_copies: bool) -> Launch:
        """Return a launch that is over when all that the ranks have enqueued before is."""
        early = self._early and not after_copies
        return Launch(direct_kernel(), self._arguments(tag), blocks=1, threads=_FEWEST_THREADS, early=early)

    def _arguments(self, tag: int) -> DirectArguments:
        arguments = DirectArguments(team=self._team, arrivals=self._layout.arrivals)
        arguments.team.tag = tag
        return arguments

    def _geometry(self, packets: int) -> tuple[int, int]:
        """Return blocks and threads for so many packets from one rank to another; the same on all ranks."""
        threads = _FEWEST_THREADS
        while threads < _MOST_THREADS_FOR_ALL_BLOCKS and packets > threads * self._most_blocks:
            threads *= 2
        if packets > 4 * threads * self._most_blocks:
            threads = DIRECT_THREADS
        return max(1, min(self._most_blocks, -(-packets // threads))), threads
