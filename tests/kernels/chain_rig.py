"""Chains of ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.gpu.algorithms.chain.plan import ChainPlanner
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory
from mpicomm.collectives.gpu.algorithms.packets.arguments import ABSENT
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import Team
from tests.helpers.patterns import Pattern
from tests.kernels.build import Builds, Change
from tests.kernels.memory_rig import MemoryRig


class ChainRig(MemoryRig[ChainPlanner]):
    """``blocks`` is how many a kernel has for one place at most; slots are those for messages of ``nbytes``."""

    def __init__(
        self,
        builds: Builds,
        size: int,
        blocks: int,
        *,
        nbytes: int = 1 << 30,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        def planner(team: Team, layout: ChannelMemory) -> ChainPlanner:
            return ChainPlanner(team, blocks)

        layout = ChainPlanner(Team(), blocks).layout(nbytes, hops=1)
        super().__init__(builds, size, layout, planner, changes=changes, timeout_s=timeout_s)
        for place in self.memory:
            place.bytes[layout.slots : layout.nbytes].view(np.uint32)[:] = ABSENT

    def run(
        self,
        rank: int,
        pattern: Pattern,
        signature: Signature,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part of a chain."""
        assert threads is None
        call, memory = pattern.call(signature), self.machine.addresses(self.memory, rank)
        launch = self.planners[rank].launch(pattern.chain, call.reduction, call.tag(), self.layout, memory)
        self.launch(rank, launch, threads=None, nap_us=nap_us)
