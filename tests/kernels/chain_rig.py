"""Chains of ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.chain.plan import ChainLauncher, layout_of
from mpicomm.collectives.gpu.algorithms.memory import ArenaRegion, ChannelMemory
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import ABSENT, Team
from tests.helpers.inputs.patterns import Pattern
from tests.kernels.build import Builds, Change
from tests.kernels.memory_rig import MemoryRig


class ChainRig(MemoryRig[Domain]):
    """A kernel has at most ``blocks`` blocks for one place; the slots hold messages of ``nbytes``."""

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
        def node(team: Team, layout: ChannelMemory) -> Domain:
            memory = tuple(self.machine.addresses(self.memory, team.rank))
            region = ArenaRegion(memory, layout.nbytes - layout.slots)
            arena: Any = SimpleNamespace(has=lambda request: True, region=lambda request: region)
            return Domain(team, arena, blocks)

        nowhere: Any = None
        layout = layout_of(nbytes, 1, Domain(Team(), nowhere, blocks))
        super().__init__(builds, size, layout, node, changes=changes, timeout_s=timeout_s)
        for place in self.memory:
            place.bytes[layout.slots : layout.nbytes].view(np.uint32)[:] = ABSENT

    def run(self, rank: int, pattern: Pattern, signature: Signature, *, nap_us: int = 0) -> None:
        """Enqueue a rank's part of a chain."""
        launcher = ChainLauncher(pattern.form, self.planners[rank])
        lengths, begins = pattern.form.numbers(pattern.buffers)
        filled = launcher.fill(lengths, begins, max(lengths), signature.hash32)
        assert filled is not None
        self.launch(rank, launcher.launch(filled), nap_us=nap_us)
