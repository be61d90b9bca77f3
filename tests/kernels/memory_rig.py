"""Memory and planners of kernels that pass slots, between the ranks of a machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, escapes_nbytes
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import HEAD_NBYTES, Team
from tests.kernels.build import Builds, Change
from tests.kernels.launches import enqueue
from tests.kernels.machine import Machine

Planner = TypeVar("Planner")


class MemoryRig(Generic[Planner]):
    """Memory of this layout, and a planner, for each rank; subclasses enqueue the work."""

    def __init__(
        self,
        builds: Builds,
        size: int,
        layout: ChannelMemory,
        planner: Callable[[Team, ChannelMemory], Planner],
        *,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.machine = machine = Machine(builds, size)
        self.size = size
        self.layout = layout
        self._changes = changes
        arenas = [machine.allocate(rank, HEAD_NBYTES) for rank in range(size)]
        nbytes = layout.nbytes + escapes_nbytes(layout.nbytes - layout.slots)
        self.memory = [machine.allocate(rank, nbytes) for rank in range(size)]
        machine.keep()
        self.planners = [planner(machine.team(arenas, rank, timeout_s), layout) for rank in range(size)]

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        channels = self.layout.size * self.layout.channels
        for memory in self.memory:
            memory.bytes[: 2 * channels * 4].view(np.uint32)[:] = epoch
            memory.bytes[self.layout.credits : self.layout.slots].view(np.uint64)[:] = epoch << 32

    def launch(self, rank: int, launch: Launch, *, threads: int | None = None, nap_us: int) -> None:
        """Enqueue a kernel of a rank; blocks of ``threads`` instead of as many as the package wants."""
        enqueue(self.machine, rank, launch, changes=self._changes, threads=threads, nap_us=nap_us)
