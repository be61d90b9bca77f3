"""DeviceArena: the memory that each rank of a communicator opens to the kernels of its peers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.gpu.algorithms.memory import ArenaLayout, ArenaRegion, Inboxes, Request
from mpicomm.devices.base import Segment
from mpicomm.devices.cuda.memory import BLOCK_NBYTES, round_up
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import Kind, MemoryUse
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.kernels.team import ABORT_OPERATION, ABSENT, MISMATCH
from mpicomm.sharing.segments import SharedSegments, SuspendedContent, share

_PURPOSE = "collectives: arena"


class NoMemoryError(HandleError):
    """The ranks could not set up memory that a call needs; raised on all ranks."""


class OverBoundError(NoMemoryError, InvalidUsageError):
    """Memory that a call needs would exceed MPICOMM_MEMORY; raised on all ranks."""


class DeviceArena:
    """Every rank's arena, and the regions that calls have requested. Construction is collective, as ``share`` is.

    A region lives until the communicator is freed, because a captured graph may still use it. All regions of a rank
    together take at most ``most_nbytes``.
    """

    def __init__(
        self, node: Group, backend: GpuBackend, kind: Kind, layout: ArenaLayout, most_nbytes: int | None = None
    ) -> None:
        self._node = node
        self._backend = backend
        self._kind = kind
        self._most_nbytes = most_nbytes
        self.layout = layout
        self._segments = self._share(_PURPOSE, layout)
        self._regions: dict[Request, SharedSegments] = {}
        self.pointers = tuple(self._segments.pointers)
        self.flagged = self._at(layout.flagged, layout.flagged_inbox_nbytes)
        self.sentinels = self._at(layout.sentinels, layout.sentinel_inbox_nbytes)
        self.any_length = self.sentinels

    def has(self, request: Request) -> bool:
        """Return whether a request fits into a region. Local, the same on all ranks."""
        return self._find(request) is not None

    def require_room(self, request: Request) -> None:
        """Raise `OverBoundError` if a new region would exceed the bound. Local, the same on all ranks.

        All ranks agree without communication, because they have the same bound and the same regions.
        """
        if self._most_nbytes is None:
            return
        wanted = _allocated_nbytes(request)
        left = self._most_nbytes - sum(map(_allocated_nbytes, self._regions))
        if wanted > left:
            raise OverBoundError(
                f"MPICOMM_MEMORY leaves {max(left, 0)} bytes for shared memory of this communicator, and "
                f'"{request.what}" takes {wanted}: raise MPICOMM_MEMORY by {wanted - left} bytes or more, or unset it'
            )

    def set_up(self, request: Request) -> None:
        """Set up a region for a request. Collective; raises `NoMemoryError`, and as ``share`` does."""
        try:
            # Only within `loading` may a thread that captures a graph allocate and wait.
            with self._backend.loading():
                segments = self._share(request.what, request)
        except HandleError as error:
            raise NoMemoryError(str(error), ranks=error.ranks) from error
        self._regions[request] = segments

    def region(self, request: Request) -> ArenaRegion:
        """Return the smallest region that a request fits into. Local."""
        found = self._find(request)
        assert found is not None, request
        return ArenaRegion(tuple(self._regions[found].pointers), found.slots_nbytes)

    def abort(self) -> None:
        """Let the kernels of all ranks give up, as if a kernel had found a rank in another call. Local, blocking."""
        # Pairs with the loads of the abort word in is_healthy and Patience: without it kernels would wait until their
        # time is up. One byte is enough, because kernels only check whether the word is zero. A report that this byte
        # overwrites loses only its operation.
        for pointer in self.pointers:
            self._backend.fill(pointer + ABORT_OPERATION, 1, MISMATCH)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of this rank's arena and regions; local."""
        yield MemoryUse.of_kind(_PURPOSE, self._kind, self._segments.own.nbytes)
        for request, segments in self._regions.items():
            yield MemoryUse.of_kind(request.what, self._kind, segments.own.nbytes)

    def memories(self) -> tuple[SharedSegments, ...]:
        """Return the memories of the arena and of all regions; local."""
        return self._segments, *self._regions.values()

    def close_peers(self) -> None:
        """Unmap the peers' memory; local."""
        for segments in self.memories():
            segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's memory; local, after every peer's `close_peers`."""
        for segments in self.memories():
            segments.close_own()

    def _find(self, request: Request) -> Request | None:
        # All ranks find the same region, because they have set up every region together.
        fitting = [
            each
            for each in self._regions
            if (each.what, each.words_nbytes) == (request.what, request.words_nbytes)
            and each.slots_nbytes >= request.slots_nbytes
        ]
        return min(fitting, key=lambda each: each.slots_nbytes, default=None)

    def _share(self, what: str, memory: ArenaLayout | Request) -> SharedSegments:
        def allocate() -> Segment:
            segment = self._backend.allocate(self._kind, memory.nbytes)
            # This rank fills the memory before it exports it to the peers. A later fill could wipe out the first data
            # that a peer stores there.
            self._fill(memory, segment.pointer)
            return segment

        segments = share(self._node, self._backend, what, allocate, lambda: memory.nbytes)
        # Between calls no rank waits for another one. So calls go on if the memory of all ranks is as at first.
        keeps_all = isinstance(memory, Request) and memory.holds_messages
        segments.content = (
            SuspendedContent(memory.nbytes) if keeps_all else SuspendedContent(fill=partial(self._fill, memory))
        )
        return segments

    def _fill(self, memory: ArenaLayout | Request, pointer: int) -> None:
        begin, end = memory.absent
        self._backend.fill(pointer, begin, 0)
        self._backend.fill_words(pointer + begin, end - begin, ABSENT)
        self._backend.fill(pointer + end, memory.nbytes - end, 0)

    def _at(self, offset: int, nbytes: int) -> Inboxes:
        return Inboxes(tuple(pointer + offset for pointer in self.pointers), nbytes)


def _allocated_nbytes(request: Request) -> int:
    return round_up(request.nbytes, BLOCK_NBYTES)
