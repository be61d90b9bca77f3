"""Messages in the order of streams between ranks of a machine, with the arguments that the package makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvPlanner, sendrecv_memory
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.mpi.arguments import Span
from tests.kernels.build import Builds, Change
from tests.kernels.machine import Array, Place
from tests.kernels.memory_rig import MemoryRig


class SendrecvRig(MemoryRig[SendrecvPlanner]):
    """Two ranks have ``channels`` channels, each way."""

    def __init__(
        self, builds: Builds, size: int, channels: int, *, changes: Sequence[Change] = (), timeout_s: float = 20
    ) -> None:
        layout = sendrecv_memory(size, channels)
        super().__init__(builds, size, layout, SendrecvPlanner, changes=changes, timeout_s=timeout_s)

    def epoch(self, rank: int, peer: int, *, sent: bool) -> int:
        """Return the number of chunks that ``rank`` has counted on its first channel to ``peer``, or from it."""
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
        template = self.planners[rank].template(sent, received, self.machine.addresses(self.memory, rank))
        send, receive = (Span(0, 0) if message is None else message.span for message in (sent, received))
        for step in template.steps(template.fill(send.pointer, send.count, receive.pointer, receive.count)):
            assert isinstance(step, Launch)
            self.launch(rank, step, threads=threads, nap_us=nap_us)

    def content(self, rng: np.random.Generator, nbytes: int) -> Array:
        """Return random bytes."""
        return rng.integers(0, 256, nbytes, np.uint8)
