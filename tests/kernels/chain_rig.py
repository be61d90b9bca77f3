"""Chains of ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.device_chain import ChainLayout, ChainPlanner
from mpicomm.collectives.device_channels import reduction_of
from mpicomm.collectives.device_program import tag_of
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import HEAD_NBYTES, Team
from tests.kernels.build import Builds, Change
from tests.kernels.exchange_rig import kernel_of
from tests.kernels.machine import Machine


class ChainRig:
    """Memory for chains and a planner for each rank; ``blocks`` is how many a kernel has for one place at most."""

    def __init__(
        self, builds: Builds, size: int, blocks: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        self.machine = machine = Machine(builds, size)
        self.size = size
        self._changes = changes
        self.layout = ChainLayout(blocks)
        arenas = [machine.allocate(rank, HEAD_NBYTES) for rank in range(size)]
        self.memory = [machine.allocate(rank, self.layout.nbytes) for rank in range(size)]
        machine.keep()
        self._planners = []
        for rank in range(size):
            team = Team(faults=machine.faults[rank], timeout_ns=int(timeout_s * 1e9), size=size, rank=rank)
            for owner, address in enumerate(machine.addresses(arenas, rank)):
                team.arenas[owner], team.names[owner] = address, 10 + owner
            self._planners.append(ChainPlanner(team, self.layout))

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone along all channels."""
        for memory in self.memory:
            memory.bytes[: 2 * self.layout.channels * 4].view(np.uint32)[:] = epoch
            memory.bytes[self.layout.credits : self.layout.slots].view(np.uint64)[:] = epoch << 32

    def run(
        self,
        rank: int,
        exchanges: Sequence[Exchange],
        signature: Signature,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part of a chain."""
        assert threads is None
        reduction = reduction_of(exchanges[0].dtype, signature.op) if signature.op else None
        memory = self.machine.addresses(self.memory, rank)
        launch = self._planners[rank].launch(exchanges, reduction, tag_of(signature, 0), memory)
        kernel = kernel_of(self.machine.builds, launch.variant, self._changes)
        self.machine.launch(
            rank, kernel, [launch.arguments], blocks=launch.blocks, threads=launch.threads, nap_us=nap_us
        )
