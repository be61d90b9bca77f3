"""Memory that ranks release together, and the pads of signals."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from mpicomm.cluster.agreement import Group
from mpicomm.devices.cuda.types import Backend
from mpicomm.devices.handle import Kind, MemoryUse
from mpicomm.sharing.segments import SharedSegments, SuspendedContent, share

_WORD_NBYTES = 8
_LINE_NBYTES = 128  # pads share neither cache lines nor the sectors that a GPU polls
_CHUNK_NBYTES = 64 * 1024


@dataclass(frozen=True)
class SignalPad:
    """The counters of an array: for each rank of the node an inbox, the signals sent to it, and the waits for it.

    Only rank i writes inbox i of a peer's pad. Only the owner writes the other two. So no counter has two writers.
    """

    number: int
    bases: tuple[int, ...]
    """The address of every rank's pad on this rank, by index in the node."""
    own: int

    def inbox(self, owner: int, sender: int) -> int:
        """Address at which ``sender`` counts its signals to ``owner``."""
        return self.bases[owner] + sender * _WORD_NBYTES

    def sent(self, peer: int) -> int:
        """Address at which this rank counts its signals to ``peer``."""
        return self.bases[self.own] + (len(self.bases) + peer) * _WORD_NBYTES

    def expected(self, peer: int) -> int:
        """Address at which this rank counts its waits for ``peer``."""
        return self.bases[self.own] + (2 * len(self.bases) + peer) * _WORD_NBYTES


class Shared(Protocol):
    """Memory or events that ranks release in two steps: all unmap the peers' parts, then each rank frees its part."""

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's part; local."""

    def close_peers(self) -> None:
        """Unmap the peers' part; local."""

    def close_own(self) -> None:
        """Free this rank's part; local, after every peer's `close_peers`."""


@runtime_checkable
class Suspendable(Protocol):
    """A `Shared` with memory that a suspension may give back."""

    def memories(self) -> Iterable[SharedSegments]:
        """Return the memory, on all ranks in the same order. Memory without a content stays. Local."""


class SharedMemory:
    """A `Suspendable`: segments of each rank, which the other ranks have opened."""

    closed = False

    def __init__(self, purpose: str, kind: Kind, *segments: SharedSegments) -> None:
        self._purpose = purpose
        self._kind = kind
        self._segments = list(segments)
        self.pointers = segments[0].pointers if segments else []
        """The address of each rank's first segment on this rank."""

    def memory_use(self) -> Iterable[MemoryUse]:
        return [MemoryUse.of_kind(self._purpose, self._kind, each.own.nbytes) for each in self._segments]

    def memories(self) -> Iterable[SharedSegments]:
        return self._segments

    def close_peers(self) -> None:
        self.closed = True
        for each in self._segments:
            each.close_peers()

    def close_own(self) -> None:
        for each in self._segments:
            each.close_own()


class SignalPads(SharedMemory):
    """The pads of a communicator, cut from chunks. All ranks take and return them in the same order."""

    def __init__(self, node: Group, backend: Backend, kind: Kind) -> None:
        super().__init__("signal pads", kind)  # a segment is a chunk
        self._node = node
        self._backend = backend
        self._free: list[int] = []
        pad_nbytes = 3 * _WORD_NBYTES * node.size
        self._stride = -(-pad_nbytes // _LINE_NBYTES) * _LINE_NBYTES
        self._per_chunk = max(1, _CHUNK_NBYTES // self._stride)

    def take(self, what: str) -> SignalPad:
        """Return a pad, which the caller clears. Collective if it needs a new chunk, else local.

        ``what`` names the call in errors.
        """
        if not self._free:
            nbytes = self._per_chunk * self._stride
            chunk = share(
                self._node,
                self._backend,
                f"{what}: signal pads",
                lambda: self._backend.allocate(self._kind, nbytes),
                lambda: nbytes,
            )
            chunk.content = SuspendedContent(nbytes)
            first = len(self._segments) * self._per_chunk
            self._segments.append(chunk)
            self._free.extend(range(first, first + self._per_chunk))
        number = heapq.heappop(self._free)
        index, slot = divmod(number, self._per_chunk)
        chunk = self._segments[index]
        bases = tuple(chunk[rank].pointer + slot * self._stride for rank in range(self._node.size))
        return SignalPad(number, bases, self._node.rank)

    def clear(self, pad: SignalPad) -> None:
        """Set this rank's counters to zero; local. Peers may signal only after the next exchange with them."""
        self._backend.zero(pad.bases[pad.own], self._stride)

    def give_back(self, pad: SignalPad) -> None:
        """Let `take` return the pad again; local. Every peer must have stopped using it."""
        heapq.heappush(self._free, pad.number)


AnyShared = TypeVar("AnyShared", bound=Shared)
