"""Network messages between peer domains of one node, through mapped memory, by copies and signals."""

from __future__ import annotations

from collections.abc import Iterable

from mpicomm.cluster.agreement import Group
from mpicomm.devices.cuda.types import Backend, Segment
from mpicomm.devices.handle import Kind
from mpicomm.domains.steps import NetworkMessage, NetworkStep
from mpicomm.sharing.segments import SharedMemory, SignalPad, SignalPads, SuspendedContent, share

SLOT_NBYTES = 4 << 20
_CHANNELS = 2
_PURPOSE = "slots between peer domains"


class MappedChannels(SharedMemory):
    """`SharedMemory`: two slots for each other rank of the node. Construction is collective over ``node``.

    A sender waits until its slot is free, copies a chunk into the slot, and signals. The receiver waits for the signal,
    copies the chunk out, and signals that the slot is free. Chunk k of a network message goes through channel k modulo
    2, so one chunk is copied in while another is copied out. Each channel strictly alternates, and all counts are in
    device memory, so a captured graph can be replayed any number of times.

    Ranks cannot deadlock: every rank sends its chunks k before it receives chunks k, and it receives on another stream.
    Take the slowest rank, at chunk k. The ranks to which it sends have received chunk k - 2, or will receive it without
    this rank. So its slots become free. The ranks from which it receives are at chunk k or later.
    """

    def __init__(self, node: Group, backend: Backend, kind: Kind, pads: SignalPads) -> None:
        self._node = node
        self._backend = backend
        self._full = [pads.acquire(_PURPOSE) for _ in range(_CHANNELS)]
        self._free = [pads.acquire(_PURPOSE) for _ in range(_CHANNELS)]
        nbytes = _CHANNELS * node.size * SLOT_NBYTES

        def clear_and_allocate() -> Segment:
            # Before the peers get the handles of the slots, because it could wipe out a peer's first signal.
            for pad in (*self._full, *self._free):
                pads.clear(pad)
            return backend.allocate(kind, nbytes)

        super().__init__(_PURPOSE, kind, share(node, backend, _PURPOSE, clear_and_allocate, lambda: nbytes))
        self._segments[0].content = SuspendedContent()  # the slots are empty between calls
        stream = backend.stream(None)
        for pad in self._free:
            for peer in range(node.size):
                if peer != node.rank:
                    self._signal(pad, peer, stream)  # every slot is free at first
        backend.synchronize(stream)

    def exchange(self, network_step: NetworkStep, out: int, into: int) -> None:
        """Enqueue network messages: copies to peers on the stream ``out``, copies from slots on ``into``. Local."""
        longest = max((message.nbytes for message in (*network_step.sends, *network_step.receives)), default=0)
        for number, start in enumerate(range(0, longest, SLOT_NBYTES)):
            channel = number % _CHANNELS
            for peer, pointer, nbytes in self._chunks(network_step.sends, start):
                self._wait(self._free[channel], peer, out)
                self._backend.copy(self._slot(channel, peer, self._node.rank), pointer, nbytes, out)
                self._signal(self._full[channel], peer, out)
            for peer, pointer, nbytes in self._chunks(network_step.receives, start):
                self._wait(self._full[channel], peer, into)
                self._backend.copy(pointer, self._slot(channel, self._node.rank, peer), nbytes, into)
                self._signal(self._free[channel], peer, into)

    def _chunks(self, messages: Iterable[NetworkMessage], start: int) -> Iterable[tuple[int, int, int]]:
        for rank, pointer, nbytes in messages:
            if start < nbytes:
                yield self._node.ranks.index(rank), pointer + start, min(SLOT_NBYTES, nbytes - start)

    def _slot(self, channel: int, owner: int, sender: int) -> int:
        return self.pointers[owner] + (channel * self._node.size + sender) * SLOT_NBYTES

    def _signal(self, pad: SignalPad, peer: int, stream: int) -> None:
        self._backend.signal(pad.sent(peer), pad.remote_inbox(peer), stream)

    def _wait(self, pad: SignalPad, peer: int, stream: int) -> None:
        rank = self._node.ranks[peer]
        self._backend.wait_signal(pad.expected(peer), pad.inbox(peer), rank, stream)
