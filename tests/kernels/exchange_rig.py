"""Exchanges between the ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChunkTemplate
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import LINE_NBYTES
from tests.kernels.build import Change
from tests.kernels.launches import enqueue
from tests.kernels.machine import Machine


class ExchangeRig:
    """An arena and a template for each rank; an exchange has at most ``channels`` blocks.

    Each launch draws its number of ``threads``; None is the number of the package.
    """

    def __init__(
        self,
        machine: Machine,
        channels: int,
        *,
        threads: Sequence[int | None] = (None,),
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.machine = machine
        self.size = machine.size
        self.layout = ArenaLayout(self.size, channels)
        self.arenas = [machine.allocate(rank, self.layout.nbytes) for rank in range(self.size)]
        self._slots = [machine.allocate(rank, self.layout.slots_nbytes) for rank in range(self.size)]
        machine.keep()
        self._threads = threads
        self._rng = np.random.default_rng(machine.size)
        self._changes = changes
        self._templates = [
            ChunkTemplate(machine.team(self.arenas, rank, timeout_s), self.layout) for rank in range(self.size)
        ]

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        pairs = self.size * self.layout.channels
        for arena in self.arenas:
            arena.bytes[self.layout.counts :][: 2 * pairs * 4].view(np.uint32)[:] = epoch
            for start in (self.layout.credits, self.layout.flags):
                arena.bytes[start : start + pairs * LINE_NBYTES].view(np.uint64)[:] = epoch << 32

    def epoch(self, rank: int, peer: int, *, sent: bool) -> int:
        """Return the number of chunks that ``rank`` has counted on its first channel to ``peer``, or from it."""
        row = self.size + peer if sent else peer
        counts = self.arenas[rank].bytes[self.layout.counts :].view(np.uint32)
        return int(counts[row * self.layout.channels])

    def run(self, rank: int, exchanges: Sequence[Exchange], signature: Signature, *, nap_us: int = 0) -> None:
        """Enqueue a rank's part of a collective."""
        for step, exchange in enumerate(exchanges):
            slots = self.machine.addresses(self._slots, rank)
            launch = self._templates[rank].launch(exchange, (signature.hash32, step), slots)
            if launch is not None:
                threads = self._threads[int(self._rng.integers(len(self._threads)))]
                enqueue(self.machine, rank, launch, changes=self._changes, threads=threads, nap_us=nap_us)
