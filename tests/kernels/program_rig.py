"""Whole collectives between the ranks of a machine, by the kernels and copies that the package chooses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainPlanner
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChannelPlanner
from mpicomm.collectives.gpu.algorithms.copies.plan import Copy, Reduce, local_reduction
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectPlanner
from mpicomm.collectives.gpu.algorithms.launch import Launch
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Inboxes, escapes_nbytes
from mpicomm.collectives.gpu.algorithms.packets.arguments import ABSENT
from mpicomm.collectives.gpu.algorithms.packets.plan import PacketPlanner
from mpicomm.collectives.gpu.program import Planners, Program
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import Team
from mpicomm.symmetric.registry import Mapped
from tests.kernels.exchange_rig import kernel_of
from tests.kernels.machine import Machine
from tests.kernels.packet_rig import SmallLayout

BLOCKS, CHANNELS, CHAIN_BLOCKS = 2, 2, 1
INBOX_NBYTES = 144 << 10  # six steps of packets in as many blocks, and a little
STAGING_NBYTES = 1 << 20
MOST_STAGED_NBYTES = 96 << 10  # less than a message: regions are used again


class SimulatedArena:
    """The arena of one rank's planners: that of the rig as this rank sees it, and no more memory than that."""

    def __init__(
        self,
        layout: SmallLayout,
        arenas: Sequence[int],
        slots: Sequence[int],
        staging: Sequence[int],
        chain: Sequence[int],
        *,
        chain_layout: ChannelMemory,
    ) -> None:
        self.layout = layout
        self.flagged = Inboxes(tuple(base + layout.flagged for base in arenas), layout.flagged_inbox_nbytes)
        self.sentinels = Inboxes(tuple(base + layout.sentinels for base in arenas), layout.sentinel_inbox_nbytes)
        self._slots, self._staging = tuple(slots), tuple(staging)
        self._chain = chain_layout, tuple(chain)
        self.most_inbox_nbytes = INBOX_NBYTES

    def large_inboxes(self, nbytes: int) -> Inboxes:
        """Return the ordinary ones, which are used again the more often."""
        return self.sentinels

    def slots(self) -> tuple[int, ...]:
        return self._slots

    def chain(self, layout: ChannelMemory) -> tuple[ChannelMemory, tuple[int, ...]]:
        assert layout.nbytes <= self._chain[0].nbytes
        return self._chain

    def staging(self, nbytes: int) -> tuple[int, ...]:
        assert nbytes <= STAGING_NBYTES
        return self._staging


class ProgramRig:
    """Planners for each rank, and symmetric memory of ``nbytes``."""

    def __init__(self, machine: Machine, nbytes: int, *, timeout_s: float = 20) -> None:
        self.machine = machine
        self.size = machine.size
        layout = SmallLayout(self.size, CHANNELS, INBOX_NBYTES, INBOX_NBYTES)
        arenas = [machine.allocate(rank, layout.nbytes) for rank in range(self.size)]
        slots = [machine.allocate(rank, layout.slots_nbytes) for rank in range(self.size)]
        staging = [machine.allocate(rank, STAGING_NBYTES) for rank in range(self.size)]
        chain_layout = ChainPlanner(Team(), CHAIN_BLOCKS).layout(1 << 30, hops=1)
        chain_nbytes = chain_layout.nbytes + escapes_nbytes(chain_layout.nbytes - chain_layout.slots)
        chain = [machine.allocate(rank, chain_nbytes) for rank in range(self.size)]
        self.outputs = [machine.allocate(rank, nbytes) for rank in range(self.size)]
        machine.keep()
        for arena in arenas:
            arena.bytes[layout.sentinels : layout.escapes].view(np.uint32)[:] = ABSENT
        for place in chain:
            place.bytes[chain_layout.slots : chain_layout.nbytes].view(np.uint32)[:] = ABSENT
        self._planners = []
        for rank in range(self.size):
            bases = machine.addresses(arenas, rank)
            team = machine.team(arenas, rank, timeout_s)
            here = [machine.addresses(each, rank) for each in (slots, staging, chain)]
            arena_here = SimulatedArena(layout, bases, *here, chain_layout=chain_layout)
            self._planners.append(
                Planners(
                    rank,
                    self.size,
                    arena_here,  # type: ignore[arg-type]
                    MOST_STAGED_NBYTES,
                    1.0,
                    ChannelPlanner(team, layout),
                    PacketPlanner(team, arena_here, BLOCKS),  # type: ignore[arg-type]
                    DirectPlanner(team, layout, BLOCKS),
                    ChainPlanner(team, CHAIN_BLOCKS),
                )
            )

    def run(
        self,
        rank: int,
        exchanges: Sequence[Exchange],
        signature: Signature,
        *,
        threads: int | None = None,
        nap_us: int = 0,
        symmetric: bool = False,
        algorithm: str = "one_shot",
    ) -> None:
        """Enqueue a rank's part of a collective, all of it on one stream; ``symmetric`` if it is into `outputs`."""
        assert threads is None
        memory = Mapped(1, 0, tuple(self.machine.addresses(self.outputs, rank))) if symmetric else None
        for step in Program(self._planners[rank], exchanges, signature, memory, algorithm).steps():
            if isinstance(step, Copy):
                step = local_reduction(Reduce((step.source,), step.target, step.nbytes), ("uint8", "max"))
            if isinstance(step, Launch):
                kernel = kernel_of(self.machine.builds, step.variant)
                parameters = [step.arguments]
                self.machine.launch(rank, kernel, parameters, blocks=step.blocks, threads=step.threads, nap_us=nap_us)
                nap_us = 0
