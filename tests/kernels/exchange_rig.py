"""Exchanges between the ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.chunks.plan import ChannelPlanner
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import LINE_NBYTES
from mpicomm.kernels.variant import Variant
from tests.kernels.build import Builds, Change, Kernel
from tests.kernels.machine import Machine


def kernel_of(builds: Builds, variant: Variant, changes: Sequence[Change] = ()) -> Kernel:
    """Return a kernel of the package for the processor."""
    options = [option for option in variant.options if option.startswith("-D")]
    return builds.kernel(variant.source, variant.entry, options, changes=changes)


class ExchangeRig:
    """An arena and a planner for each rank; ``channels`` is how many blocks an exchange has at most."""

    def __init__(
        self, machine: Machine, channels: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        self.machine = machine
        self.size = machine.size
        self.layout = ArenaLayout(self.size, channels)
        self.arenas = [machine.allocate(rank, self.layout.nbytes) for rank in range(self.size)]
        self._slots = [machine.allocate(rank, self.layout.slots_nbytes) for rank in range(self.size)]
        machine.keep()
        self._changes = changes
        self._planners = [
            ChannelPlanner(machine.team(self.arenas, rank, timeout_s), self.layout) for rank in range(self.size)
        ]

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        pairs = self.size * self.layout.channels
        for arena in self.arenas:
            arena.bytes[self.layout.counts :][: 2 * pairs * 4].view(np.uint32)[:] = epoch
            for start in (self.layout.credits, self.layout.flags):
                arena.bytes[start : start + pairs * LINE_NBYTES].view(np.uint64)[:] = epoch << 32

    def epoch(self, rank: int, peer: int, *, sent: bool) -> int:
        """Return how many chunks ``rank`` has counted on its first channel to ``peer``, or from it."""
        row = self.size + peer if sent else peer
        counts = self.arenas[rank].bytes[self.layout.counts :].view(np.uint32)
        return int(counts[row * self.layout.channels])

    def run(
        self,
        rank: int,
        exchanges: Sequence[Exchange],
        signature: Signature,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part of a collective; blocks of ``threads`` instead of as many as the package wants."""
        for step, exchange in enumerate(exchanges):
            slots = self.machine.addresses(self._slots, rank)
            launch = self._planners[rank].launch(exchange, (signature.hash32, step), slots)
            if launch is not None:
                self._enqueue(rank, launch, threads, nap_us)

    def _enqueue(self, rank: int, launch: Launch, threads: int | None, nap_us: int) -> None:
        kernel = kernel_of(self.machine.builds, launch.variant, self._changes)
        self.machine.launch(
            rank, kernel, [launch.arguments], blocks=launch.blocks, threads=threads or launch.threads, nap_us=nap_us
        )
