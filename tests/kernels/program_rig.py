"""Whole collectives between the ranks of a machine, by the algorithms that the package chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.chain.plan import layout_of
from mpicomm.collectives.gpu.algorithms.copies.plan import local_reduction
from mpicomm.collectives.gpu.algorithms.copies.schedule import Reduce
from mpicomm.collectives.gpu.algorithms.memory import ArenaRegion, Request
from mpicomm.collectives.gpu.algorithms.steps import Copy, Launch, Step
from mpicomm.collectives.gpu.decision import Decision
from mpicomm.collectives.gpu.tuning import BUILT_IN
from mpicomm.collectives.signature import Signature
from mpicomm.kernels.team import ABSENT, Team
from mpicomm.symmetric.registry import Mapped
from tests.helpers.inputs.patterns import Pattern
from tests.kernels.machine import Machine, Place
from tests.kernels.packet_rig import SimulatedArena, SmallLayout

BLOCKS, CHANNELS = 2, 2
INBOX_NBYTES = 144 << 10  # six steps of packets in as many blocks, and a little
STAGING_NBYTES = 1 << 20
MOST_STAGED_NBYTES = 96 << 10  # less than a message, so that regions are used again


class Layout(SmallLayout):
    """A layout whose inboxes have their largest size, so that longer messages use them again."""

    def __init__(self, size: int) -> None:
        super().__init__(size, CHANNELS, INBOX_NBYTES, INBOX_NBYTES)
        self.most_inbox_nbytes = INBOX_NBYTES


class ProgramRig:
    """A node as each rank sees it, and symmetric memory of ``nbytes``.

    With ``bare`` there is no memory but the arena, whatever the algorithm of a call.
    """

    def __init__(self, machine: Machine, nbytes: int, *, timeout_s: float = 20, bare: bool = False) -> None:
        self.machine = machine
        self._bare = bare
        self.size = machine.size
        self.requests: list[Request] = []
        """The memory that algorithms have asked for."""
        layout = Layout(self.size)
        # The largest slots of a chain; smaller ones of a message fit into them.
        nowhere: Any = None
        chain = layout_of(1 << 30, 1, Domain(Team(), nowhere, BLOCKS))
        requests = [
            Request("collectives: slots", layout.slots_nbytes),
            Request("collectives: copies", STAGING_NBYTES),
            Request("collectives: chain", chain.slots_nbytes, words_nbytes=chain.slots, sentinel=True),
        ]
        arenas = [machine.allocate(rank, layout.nbytes) for rank in range(self.size)]
        places: dict[Layout | Request, list[Place]] = {
            each: [machine.allocate(rank, each.nbytes) for rank in range(self.size)] for each in requests
        }
        self._memory: dict[Layout | Request, list[Place]] = {layout: arenas, **places}
        self.outputs = [machine.allocate(rank, nbytes) for rank in range(self.size)]
        machine.keep()
        self.renew(range(self.size))
        self.domains = []
        for rank in range(self.size):
            regions = {
                each.what: ArenaRegion(tuple(machine.addresses(places[each], rank)), each.slots_nbytes)
                for each in requests
            }
            arena_here = SimulatedArena(layout, machine.addresses(arenas, rank), regions)
            team = machine.team(arenas, rank, timeout_s)
            self.domains.append(Domain(team, arena_here, BLOCKS, most_staged_nbytes=MOST_STAGED_NBYTES))

    def renew(self, ranks: Sequence[int]) -> None:
        """Let the memory of these ranks be as at first, as a suspension between calls does."""
        for layout, places in self._memory.items():
            begin, end = layout.absent
            for rank in ranks:
                places[rank].bytes[:] = 0
                places[rank].bytes[begin:end].view(np.uint32)[:] = ABSENT

    def run(
        self, rank: int, pattern: Pattern, signature: Signature, *, nap_us: int = 0, symmetric: bool = False
    ) -> None:
        """Enqueue a rank's part of a collective on one stream; ``symmetric`` if its output lies in `outputs`."""
        memory = Mapped(1, 0, tuple(self.machine.addresses(self.outputs, rank))) if symmetric else None
        nowhere: Any = None
        decision = Decision(pattern.form, pattern.algorithm, BUILT_IN, self.domains[rank], nowhere)
        longest = max(decision.form.numbers(pattern.buffers)[0], default=0)
        chosen = decision.in_arena() if self._bare else decision.at(longest, symmetric=symmetric)
        self.requests += chosen.launcher.memory(longest, symmetric=symmetric)
        for step in decision.steps(chosen, pattern.buffers, signature.hash32, memory) or ():
            self.enqueue(rank, step, nap_us=nap_us)
            nap_us = 0

    def enqueue(self, rank: int, step: Step, *, nap_us: int) -> None:
        """Enqueue a step of a rank. Copies run in order with kernels, so forks and joins are nothing here."""
        if isinstance(step, Copy):
            step = local_reduction(Reduce((step.source,), step.target, step.nbytes), ("uint8", "max"))
        if isinstance(step, Launch):
            self.machine.enqueue(rank, step, nap_us=nap_us)
