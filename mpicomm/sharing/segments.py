"""Memory that the ranks of a node open for each other: allocate, export, exchange, open, and close again.

Also the objects with such memory, which ranks release collectively, signal pads, and the addresses of symmetric arrays.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar, cast, runtime_checkable

from mpicomm.cluster.agreement import Group, require_same
from mpicomm.devices.cuda.types import Backend, Segment, VirtualSegment
from mpicomm.devices.handle import SEALED_KINDS, Descriptor, Exported, Kind, MemoryHandle, MemoryUse
from mpicomm.devices.host_memory import require_sealed
from mpicomm.errors import HandleError, MpicommError
from mpicomm.sharing.fd_exchange import Address, FdExchange


class SuspendedContent(NamedTuple):
    """The content of this rank's memory after a suspension: the bytes of before, or a fill, or undefined bytes."""

    kept_nbytes: int = 0
    """The number of the first bytes, which go to the host and come back."""
    of_user: bool = False
    """Whether these bytes belong to the program, which may do without them."""
    fill: Callable[[int], None] | None = None
    """Fills the memory at an address."""


class SharedSegments:
    """The segments of all ranks by index in the node: the segment of this rank, and the mapped segments of peers."""

    def __init__(self, node: Group) -> None:
        self.node = node
        self.content: SuspendedContent | None = None
        """The bytes that survive a suspension. The owner sets it if a suspension may give the memory back."""
        self._segments: dict[int, Segment] = {}

    @property
    def own(self) -> Segment:
        """This rank's segment."""
        return self._segments[self.node.rank]

    @property
    def is_open(self) -> bool:
        """Whether this rank has its segment; the same on all ranks between two calls."""
        return self.node.rank in self._segments

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]

    @property
    def pointers(self) -> list[int]:
        """The address of each rank's segment on this rank."""
        return [self._segments[index].pointer for index in range(self.node.size)]

    def close_peers(self) -> None:
        """Unmap the peers' segments; local. The work of this rank on them must be over."""
        for index in self.peers:
            self._segments.pop(index).close()

    def close_own(self) -> None:
        """Free this rank's segment; local. Every peer must have unmapped it: see `close`."""
        if self.node.rank in self._segments:
            self._segments.pop(self.node.rank).close()

    def close(self, step: str) -> None:
        """Give everything back. Collective, blocking; this rank's work on the segments must be over.

        A barrier between the two steps keeps a rank from freeing memory that a slower peer still maps. If the barrier
        fails, the rank still frees its memory, because a peer that is gone maps nothing.
        """
        try:
            self.node.agree(step, self.close_peers)
        finally:
            self.close_peers()  # if the group is broken, `agree` has not called it
            self.close_own()

    def undo(self, step: str) -> None:
        """Give everything back as `close` does, after a failure of all ranks; raises no error.

        If the ranks made different calls, they do not meet. A rank that a Ctrl-C has taken out of the call does not
        come, and each further meeting would fail a later call of that rank.
        """
        with contextlib.suppress(MpicommError):
            if not self.node.calls_differed:
                self.close(step)  # if the group is broken, its barrier fails at once
            self.close_peers()
            self.close_own()

    @property
    def peers(self) -> list[int]:
        """The indices of the peers whose segments are mapped."""
        return [index for index in self._segments if index != self.node.rank]

    def virtual(self, index: int) -> VirtualSegment:
        """Return a segment whose memory can go and come back at its addresses."""
        return cast(VirtualSegment, self._segments[index])


def share(
    node: Group,
    backend: Backend,
    what: str,
    produce: Callable[[], Segment],
    signature: Callable[[], Hashable],
    *,
    sealed: bool = True,
) -> SharedSegments:
    """Let every rank of ``node`` open the segment that ``produce`` returns on each rank. Collective, blocking.

    ``signature`` describes the segment, and has to return the same on all ranks. ``what`` names the call in errors.
    Host memory has to be ``sealed``, unless it is memory of the user. A failure on any rank raises the same error on
    all ranks, and leaves no memory, mapping or descriptor.
    """
    shared = SharedSegments(node)
    segments = shared._segments

    def export() -> tuple[Hashable, Exported]:
        checked = signature()
        segments[node.rank] = segment = produce()
        return checked, backend.export(segment)

    def open_peer(index: int, parts: Exported) -> None:
        segments[index] = backend.open(parts)

    try:
        _exchange(node, what, export, open_peer, sealed=sealed)
    except Exception:
        shared.undo(f"{what}: undo")
        raise
    return shared


def reopen(shared: SharedSegments, backend: Backend, what: str) -> None:
    """Let every rank open the new memory that a suspension has taken for all peers. Collective, blocking.

    A failure on any rank raises the same error on all ranks.
    """

    def open_peer(index: int, parts: Exported) -> None:
        shared.virtual(index).reopen(parts)

    _exchange(shared.node, what, lambda: (None, backend.export(shared.own)), open_peer)


class _Offer(NamedTuple):
    """The description of a rank's memory for the other ranks."""

    signature: Hashable
    handles: tuple[MemoryHandle, ...]
    descriptors: int
    address: Address


def _exchange(
    node: Group,
    what: str,
    export: Callable[[], tuple[Hashable, Exported]],
    open_peer: Callable[[int, Exported], None],
    *,
    sealed: bool = True,
) -> None:
    """Call ``open_peer`` with the index of each other rank and the parts of its memory. Collective, blocking.

    ``export`` returns a signature, which has to be the same on all ranks, and the parts of this rank's memory. A
    failure on any rank raises the same error on all ranks, and no rank opens memory before all have exported theirs.
    All descriptors and sockets are closed at the end.
    """
    swaps: list[FdExchange] = []
    own_fds: list[Descriptor] = []

    def offer() -> _Offer:
        # Also without descriptors: memory of another kind, which another rank registers, may have some.
        swaps.append(temporary.enter_context(FdExchange(node.rank, node.size)))
        signature, parts = export()
        for _, fd in parts:
            if fd is not None:
                own_fds.append(fd)
                temporary.callback(fd.close)
        return _Offer(signature, tuple(handle for handle, _ in parts), len(own_fds), swaps[0].address)

    def open_all() -> None:
        counts = [offer.descriptors for offer in offers]
        received: dict[int, list[Descriptor]] = {}
        if any(counts):
            # Half the deadline, so that the ranks have time to agree that a descriptor has not come.
            addresses = [offer.address for offer in offers]
            received = swaps[0].swap(addresses, own_fds, counts, node.timeout_s / 2)
            for fd in (fd for fds in received.values() for fd in fds):
                temporary.callback(fd.close)
        for index, offer in enumerate(offers):
            if index != node.rank:
                fds = iter(received.get(index, []))
                try:
                    open_peer(index, tuple(_part(handle, fds, sealed) for handle in offer.handles))
                except HandleError as error:
                    raise HandleError(f"memory of rank {node.ranks[index]}: {error}") from error

    with contextlib.ExitStack() as temporary:
        offers = node.allgather(f"{what}: allocate and export", offer)
        require_same(what, [offer.signature for offer in offers], node.ranks)
        node.agree(f"{what}: open", open_all)


def _part(handle: MemoryHandle, fds: Iterator[Descriptor], sealed: bool) -> tuple[MemoryHandle, Descriptor | None]:
    """Return a part of a memory, with the next descriptor if its handle has one."""
    fd = next(fds, None) if handle.has_descriptor else None
    if sealed and fd is not None and handle.kind in SEALED_KINDS:
        require_sealed(fd)
    return handle, fd


_WORD_NBYTES = 8
_LINE_NBYTES = 128  # pads share neither cache lines nor the sectors that a GPU polls
_CHUNK_NBYTES = 64 * 1024


class SignalPad(NamedTuple):
    """The counters of an array: for each rank of the node an inbox, the signals sent to it, and the waits for it.

    Only rank i writes inbox i of a peer's pad. Only the owner writes the other two. So no counter has two writers.
    Ranks are indices in the node.
    """

    number: int
    bases: tuple[int, ...]
    """The address of every rank's pad on this rank."""
    rank: int

    def inbox(self, peer: int) -> int:
        """Address at which ``peer`` counts its signals to this rank."""
        return self.bases[self.rank] + peer * _WORD_NBYTES

    def remote_inbox(self, peer: int) -> int:
        """Address in the pad of ``peer`` at which this rank counts its signals to it."""
        return self.bases[peer] + self.rank * _WORD_NBYTES

    def sent(self, peer: int) -> int:
        """Address at which this rank keeps the number of its signals to ``peer``."""
        return self.bases[self.rank] + (len(self.bases) + peer) * _WORD_NBYTES

    def expected(self, peer: int) -> int:
        """Address at which this rank counts its waits for ``peer``."""
        return self.bases[self.rank] + (2 * len(self.bases) + peer) * _WORD_NBYTES


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
    """The pads of a communicator, cut from chunks. All ranks acquire and release them in the same order."""

    def __init__(self, node: Group, backend: Backend, kind: Kind) -> None:
        super().__init__("signal pads", kind)  # a segment is a chunk
        self._node = node
        self._backend = backend
        self._free: list[int] = []
        pad_nbytes = 3 * _WORD_NBYTES * node.size
        self._stride = -(-pad_nbytes // _LINE_NBYTES) * _LINE_NBYTES
        self._per_chunk = max(1, _CHUNK_NBYTES // self._stride)

    def acquire(self, what: str) -> SignalPad:
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
        self._backend.zero(pad.bases[pad.rank], self._stride)

    def release(self, pad: SignalPad) -> None:
        """Let `acquire` return the pad again; local. Every peer must have stopped using it."""
        heapq.heappush(self._free, pad.number)


AnyShared = TypeVar("AnyShared", bound=Shared)


class Mapped(NamedTuple):
    """A piece of a symmetric array. ``pointers`` are the addresses, on this rank, of the piece of every rank.

    ``array``, the number of the array, and ``offset``, in bytes, name the piece. They are the same on all ranks.
    """

    array: int
    offset: int
    pointers: tuple[int, ...]

    def __str__(self) -> str:
        return self.text_at(self.offset)

    def text_at(self, offset: int | str) -> str:
        """Return the text of another piece of the array."""
        return f"byte {offset} of symmetric array {self.array}"


class Mappings:
    """The open symmetric arrays of a communicator. All methods are local."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[int, int, tuple[int, ...]]] = {}  # by number: its ends on this rank, pointers
        self._made = 0
        self.version = 0
        """It changes with every array that a rank creates or closes: on all ranks at the same point of the program."""

    def add(self, pointers: Sequence[int], own: int, nbytes: int) -> int:
        """Add an array with ``nbytes`` on each rank, and ``pointers[own]`` on this rank; return its number."""
        self._made += 1
        self.version += 1
        self._arrays[self._made] = pointers[own], pointers[own] + nbytes, tuple(pointers)
        return self._made

    def remove(self, number: int) -> None:
        """Remove an array that is about to close."""
        self.version += 1
        self._arrays.pop(number, None)

    def find(self, pointer: int, nbytes: int) -> Mapped | None:
        """Return the piece at ``pointer`` in this rank's memory; None if it is not inside one array."""
        for number, (begin, end, pointers) in self._arrays.items():
            if nbytes > 0 and begin <= pointer and pointer + nbytes <= end:
                offset = pointer - begin
                return Mapped(number, offset, tuple([each + offset for each in pointers]))
        return None
