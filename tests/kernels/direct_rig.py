"""Exchanges straight into symmetric memory of a machine's ranks, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.gpu.algorithms.base import Domain
from mpicomm.collectives.gpu.algorithms.copies.schedule import landing_place
from mpicomm.collectives.gpu.algorithms.direct.plan import DirectTemplate
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.symmetric.registry import Mapped
from tests.helpers.inputs.launch_numbers import begin_after
from tests.kernels.build import Change
from tests.kernels.launches import enqueue
from tests.kernels.machine import Machine
from tests.kernels.packet_rig import SmallLayout

_PARITIES = 2
_INBOX_NBYTES = 512  # of packets, whose old flags this kernel wipes


class DirectRig:
    """An arena, symmetric memory of ``nbytes`` and a template for each rank."""

    def __init__(
        self,
        machine: Machine,
        nbytes: int,
        *,
        blocks: int = 3,
        changes: Sequence[Change] = (),
        timeout_s: float = 20,
    ) -> None:
        self.machine = machine
        self.size = machine.size
        layout = SmallLayout(self.size, 1, flagged_inbox_nbytes=_INBOX_NBYTES)
        self._layout = layout
        self.arenas = [machine.allocate(rank, layout.sentinels) for rank in range(self.size)]
        self.outputs = [machine.allocate(rank, nbytes) for rank in range(self.size)]
        machine.keep()
        self._changes = changes
        arena: Any = SimpleNamespace(layout=layout)
        self._templates = [
            DirectTemplate(Domain(machine.team(self.arenas, rank, timeout_s), arena, blocks, early=False))
            for rank in range(self.size)
        ]

    def start_at(self, launch: int, *, moved: int | None = None) -> None:
        """Let all ranks have begun and ended this launch; ``moved`` is the last that moved data, if not the same."""
        arrived = launch if moved is None else moved
        for arena in self.arenas:
            begin_after(launch, arena.bytes, self.size)
            arena.bytes[self._layout.arrivals : self._layout.flagged].view(np.uint64)[:] = arrived

    def flags(self, rank: int) -> np.ndarray:
        """Return the inboxes of the LL protocol of a rank, of either parity, as words."""
        words = self.arenas[rank].bytes[self._layout.flagged : self._layout.sentinels].view(np.uint64)
        return words.reshape(_PARITIES, -1)

    def run(self, rank: int, exchanges: Sequence[Exchange], *, tag: int = 1, nbytes: int, nap_us: int = 0) -> None:
        """Enqueue a rank's part of an exchange, of at most ``nbytes`` between two ranks."""
        memory = Mapped(1, 0, tuple(self.machine.addresses(self.outputs, rank)))
        (exchange,) = exchanges
        sends, targets, going, coming = ([0] * self.size for _ in range(4))
        for peer, (send, receive) in enumerate(zip(exchange.sends, exchange.receives, strict=True)):
            if send is not None and send.count:
                target = receive.pointer if receive is not None else 0
                if peer != rank:
                    target = landing_place(exchange, peer, memory, memory.pointers[rank])
                if target not in (0, send.pointer):
                    sends[peer], targets[peer] = send.pointer, target
                    going[peer] = send.count * exchange.dtype.itemsize
            if receive is not None and peer != rank:
                coming[peer] = receive.count * exchange.dtype.itemsize
        template = self._templates[rank]
        (launch,) = template.steps_of(template.write(sends, targets, going, coming, nbytes, tag))
        assert isinstance(launch, Launch)
        self._enqueue(rank, launch, nap_us)

    def barrier(self, rank: int, *, tag: int = 1, nap_us: int = 0) -> None:
        """Enqueue a rank's part of a barrier."""
        self._enqueue(rank, self._templates[rank].barrier(tag, after_copies=False), nap_us)

    def _enqueue(self, rank: int, launch: Launch, nap_us: int) -> None:
        # Each thread more takes ThreadSanitizer a while.
        threads = min(launch.threads, 96) if self.machine.builds.sanitize else launch.threads
        enqueue(self.machine, rank, launch, changes=self._changes, threads=threads, nap_us=nap_us)
