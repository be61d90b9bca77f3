"""Messages in the order of streams between ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.device_sendrecv import SendrecvLayout, SendrecvPlanner
from mpicomm.collectives.exchange import Message, Span
from mpicomm.kernels.team import HEAD_NBYTES, Team
from tests.kernels.build import Builds, Change
from tests.kernels.exchange_rig import kernel_of
from tests.kernels.machine import Array, Machine, Place


class SendrecvRig:
    """Memory for messages and a planner for each rank; ``channels`` is how many two ranks have, each way."""

    def __init__(
        self, builds: Builds, size: int, channels: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        self.machine = machine = Machine(builds, size)
        self.size = size
        self._changes = changes
        self.layout = SendrecvLayout(size, channels)
        arenas = [machine.allocate(rank, HEAD_NBYTES) for rank in range(size)]
        self.memory = [machine.allocate(rank, self.layout.nbytes) for rank in range(size)]
        machine.keep()
        self._planners = []
        for rank in range(size):
            team = Team(faults=machine.faults[rank], timeout_ns=int(timeout_s * 1e9), size=size, rank=rank)
            for owner, address in enumerate(machine.addresses(arenas, rank)):
                team.arenas[owner], team.names[owner] = address, 10 + owner
            self._planners.append(SendrecvPlanner(team, self.layout))

    def start_at(self, epoch: int) -> None:
        """Let all counts be as if ``epoch`` chunks had gone each way on all channels."""
        pairs = self.size * self.layout.channels
        for memory in self.memory:
            memory.bytes[: 2 * pairs * 4].view(np.uint32)[:] = epoch
            memory.bytes[self.layout.credits : self.layout.slots].view(np.uint64)[:] = epoch << 32

    def epoch(self, rank: int, peer: int, *, sent: bool) -> int:
        """Return how many chunks ``rank`` has counted on its first channel to ``peer``, or from it."""
        row = self.size + peer if sent else peer
        return int(self.memory[rank].view(np.uint8)[: self.layout.credits].view(np.uint32)[row * self.layout.channels])

    def message(self, peer: int, place: Place, tag: int | None = 0) -> Message:
        """Return all of a place as a message."""
        return Message(peer, Span(place.address, place.bytes.size), tag)

    def enqueue(
        self,
        rank: int,
        sent: Message | None = None,
        received: Message | None = None,
        *,
        threads: int | None = None,
        nap_us: int = 0,
    ) -> None:
        """Enqueue a rank's part; blocks of ``threads`` instead of as many as the package wants."""
        launch = self._planners[rank].launch(sent, received, self.machine.addresses(self.memory, rank))
        if launch is None:
            return
        kernel = kernel_of(self.machine.builds, launch.variant, self._changes)
        self.machine.launch(
            rank, kernel, [launch.arguments], blocks=launch.blocks, threads=threads or launch.threads, nap_us=nap_us
        )

    def content(self, rng: np.random.Generator, nbytes: int) -> Array:
        """Return random bytes."""
        return rng.integers(0, 256, nbytes, np.uint8)
