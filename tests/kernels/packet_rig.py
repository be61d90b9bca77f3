"""Exchanges in packets between the ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import TwoShot
from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.memory import PARITIES, ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.collectives.gpu.algorithms.packets.arguments import STAGES, Protocol
from mpicomm.collectives.gpu.algorithms.packets.configs import (
    Geometry,
    PacketConfig,
    coding_of,
    large_inboxes,
    row_geometry,
)
from mpicomm.collectives.gpu.algorithms.packets.template import PacketTemplate
from mpicomm.collectives.signature import Signature
from mpicomm.collectives.wire import Wire
from mpicomm.epilogues.base import BoundEpilogue
from mpicomm.kernels.team import ABSENT
from tests.helpers.inputs.launch_numbers import begin_after, old_flags
from tests.helpers.inputs.patterns import Pattern
from tests.helpers.rigs.filled_calls import packet_launch
from tests.kernels.build import Change
from tests.kernels.machine import Machine

SMALL = Geometry(blocks=2, workers=32)
INBOX_NBYTES = 6 * SMALL.threads * 16  # so that a message of more than six steps uses inboxes again
STARTS = {"2^30": 2**30 - 1, "2^32": 2**32 - 100}
"""Launches after which numbers begin again."""
_ANY_NBYTES = 1 << 30  # assumed for a longest message that not all ranks know


class SmallLayout(ArenaLayout):
    """The package's layout, with inboxes of any size."""

    def __init__(self, size: int, channels: int, flagged_inbox_nbytes: int, sentinel_inbox_nbytes: int = 0) -> None:
        self.flagged_inbox_nbytes, self.sentinel_inbox_nbytes = flagged_inbox_nbytes, sentinel_inbox_nbytes
        super().__init__(size, channels)


class SimulatedArena:
    """An arena as one rank sees it, with ``regions`` beyond it."""

    def __init__(self, layout: SmallLayout, arenas: Sequence[int], regions: Mapping[str, ArenaRegion]) -> None:
        self.layout: ArenaLayout = layout
        self.flagged = Inboxes(tuple(base + layout.flagged for base in arenas), layout.flagged_inbox_nbytes)
        self.sentinels = Inboxes(tuple(base + layout.sentinels for base in arenas), layout.sentinel_inbox_nbytes)
        self.any_length = self.sentinels
        self._regions = regions

    def has(self, request: Request) -> bool:
        return True

    def region(self, request: Request) -> ArenaRegion:
        if request.what == large_inboxes(self.layout, 1).what:  # the ordinary inboxes, which are used again more often
            return ArenaRegion(self.sentinels.pointers, PARITIES * STAGES * self.layout.size * self.sentinels.nbytes)
        region = self._regions[request.what]
        assert request.slots_nbytes <= region.slots_nbytes
        return region


class PacketRig:
    """An arena of one protocol for each rank; each rank can send ``inbox_nbytes`` to another."""

    def __init__(
        self,
        machine: Machine,
        protocol: Protocol = "sentinel",
        geometry: Geometry = SMALL,
        *,
        inbox_nbytes: int = INBOX_NBYTES,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.machine = machine
        self.size = machine.size
        self._protocol = protocol
        self._geometry = geometry
        self._changes = changes
        self._layout = layout = SmallLayout(self.size, 1, inbox_nbytes, inbox_nbytes)
        self.arenas = [machine.allocate(rank, layout.nbytes) for rank in range(self.size)]
        machine.keep()
        for arena in self.arenas:
            arena.bytes[layout.sentinels : layout.escapes].view(np.uint32)[:] = ABSENT
        self._domains = [
            Domain(
                machine.team(self.arenas, rank, timeout_s),
                SimulatedArena(layout, machine.addresses(self.arenas, rank), {}),
                geometry.blocks,
            )
            for rank in range(self.size)
        ]

    def start_at(self, launch: int) -> None:
        """Let all ranks have begun and ended this launch."""
        for arena in self.arenas:
            begin_after(launch, arena.bytes, self.size)

    def fill_with_old_flags(self, rng: np.random.Generator) -> None:
        """Let the inboxes of the LL protocol hold the flags of launches of the last round of numbers."""
        layout = self._layout
        for arena in self.arenas:
            flagged = arena.bytes[layout.flagged : layout.sentinels]
            flagged[:] = old_flags(flagged.nbytes, rng).view(np.uint8)

    def run(
        self,
        rank: int,
        pattern: Pattern,
        signature: Signature,
        *,
        nap_us: int = 0,
        finish: BoundEpilogue | None = None,
        wire: tuple[Wire, np.dtype[Any]] | None = None,
    ) -> None:
        """Enqueue a rank's part of a collective; the geometry of the rig divides the work among threads."""
        form, fans = replace(pattern.form, wire=wire), pattern.algorithm == "two_shot"
        shards, output = self.size if fans else 1, pattern.buffers.output
        fused = None if finish is None or output is None else finish.fused(output.pointer, shards)
        rows, steps, row_nbytes = None, pattern.steps, finish.row_nbytes if finish else 0
        if row_nbytes:
            nbytes = pattern.operation.one_shot(pattern.buffers).longest_nbytes
            longest = -(-nbytes // (row_nbytes * shards))
            rows = row_geometry(longest, row_nbytes, self._geometry.blocks, self.size, fan_out=fans)
            if fans:  # shards have whole rows
                assert pattern.operation.two_shot is not None
                whole = row_nbytes // pattern.buffers.dtype.itemsize
                steps = [pattern.operation.two_shot(replace(pattern.buffers, whole=whole))]
        for step in steps:
            exchange, fan_out = (step.first, step.second) if isinstance(step, TwoShot) else (step, None)
            nbytes = _ANY_NBYTES if pattern.operation.counts == "private" else step.longest_nbytes
            domain, geometry = self._domains[rank], self._geometry
            if rows:
                geometry, nbytes = rows.threads, rows.nbytes
            inboxes = domain.arena.flagged if self._protocol == "flagged" else domain.arena.sentinels
            coding = coding_of(form)
            template = PacketTemplate(domain, exchange, form.reduction, fan_out=fan_out, finish=fused, coding=coding)
            protocol: Protocol = "sentinel" if coding else self._protocol
            way = PacketConfig.of(protocol, inboxes, geometry, coding, self.size)
            way = replace(way, row_nbytes=rows.nbytes if rows else 0)
            launch = packet_launch(template, signature.hash32, way, nbytes, exchange.dtype.itemsize)
            self.machine.enqueue(rank, launch, changes=self._changes, nap_us=nap_us)
