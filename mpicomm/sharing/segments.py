"""Memory that the ranks of a node open for each other: allocate, export, exchange, open, and close again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from mpicomm.cluster.agreement import Group
from mpicomm.devices.base import Backend, Segment
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import FD_KINDS, SEALED_KINDS, Exported, MemoryHandle
from mpicomm.devices.host import require_sealed
from mpicomm.errors import HandleError, InvalidUsageError, MpicommError
from mpicomm.sharing.fd_exchange import Address, FdExchange


class SharedSegments:
    """The segments of all ranks by index in the node: the segment of this rank, and the mapped segments of peers."""

    def __init__(self, node: Group) -> None:
        self._node = node
        self._segments: dict[int, Segment] = {}

    @property
    def own(self) -> Segment:
        """This rank's segment."""
        return self._segments[self._node.rank]

    def __getitem__(self, index: int) -> Segment:
        return self._segments[index]

    def close_peers(self) -> None:
        """Unmap the peers' segments; local. The work of this rank on them must be over."""
        for index in [index for index in self._segments if index != self._node.rank]:
            self._segments.pop(index).close()

    def close_own(self) -> None:
        """Free this rank's segment; local. Every peer must have unmapped it: see `close`."""
        if self._node.rank in self._segments:
            self._segments.pop(self._node.rank).close()

    def close(self, step: str) -> None:
        """Give everything back. Collective, blocking; this rank's work on the segments must be over.

        A barrier between the two steps keeps a rank from freeing memory that a slower peer still maps. If the barrier
        fails, the rank still frees its memory, because a peer that is gone maps nothing.
        """
        try:
            self._node.agree(step, self.close_peers)
        finally:
            self.close_peers()  # if the group is broken, `agree` has not called it
            self.close_own()


@dataclass(frozen=True)
class _Offer:
    """The description of a rank's segment for the other ranks."""

    signature: Hashable
    packets: tuple[bytes, ...]
    descriptors: int
    address: Address | None  # for the exchange of descriptors, if the segment has any


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
    segments = SharedSegments(node)
    with contextlib.ExitStack() as temporary:  # descriptors and the socket; all ranks have opened by its end
        swap: FdExchange | None = None
        own_fds: list[Descriptor] = []

        def listen() -> Address:
            nonlocal swap
            if swap is None:
                swap = temporary.enter_context(FdExchange(node.rank, node.size))
            return swap.address

        def export() -> _Offer:
            mine = signature()
            segments._segments[node.rank] = segment = produce()
            exported = backend.export(segment)
            own_fds[:] = [fd for _, fd in exported if fd is not None]
            for fd in own_fds:
                temporary.callback(fd.close)
            packets = tuple(handle.pack() for handle, _ in exported)
            return _Offer(mine, packets, len(own_fds), listen() if own_fds else None)

        def open_peers(offers: list[_Offer], addresses: list[Address]) -> None:
            received: dict[int, list[Descriptor]] = {}
            if swap is not None:
                counts = [offer.descriptors for offer in offers]
                # Before this rank looks at a packet, because its peers wait for its descriptors even if a packet is
                # damaged. Half the deadline, so that the ranks have time to agree that a descriptor has not come.
                received = swap.swap(addresses, own_fds, counts, node.timeout_s / 2)
                for fds in received.values():
                    for fd in fds:
                        temporary.callback(fd.close)
            for index, offer in enumerate(offers):
                if index != node.rank:
                    with _naming(node.ranks[index]):
                        handles = [MemoryHandle.unpack(packet) for packet in offer.packets]
                        parts = _with_descriptors(handles, received.get(index, []))
                        for handle, descriptor in parts:
                            if sealed and descriptor is not None and handle.kind in SEALED_KINDS:
                                require_sealed(descriptor)
                        segments._segments[index] = backend.open(parts)

        try:
            offers = node.exchange(f"{what}: allocate and export", export)
            _require_same_signature(what, node, offers)
            addresses = [offer.address for offer in offers if offer.address]
            if 0 < len(addresses) < node.size:  # ranks have memory of different kinds
                addresses = node.exchange(f"{what}: exchange descriptors", listen)
        except Exception:
            # No peer has opened the segment yet. No barrier, because ranks that made another call do not come to it.
            with contextlib.suppress(MpicommError):
                segments.close_own()
            raise
        try:
            node.agree(f"{what}: open", lambda: open_peers(offers, addresses))
        except Exception:
            # All ranks meet here, or the group is broken and its barrier fails at once.
            with contextlib.suppress(MpicommError):
                segments.close(f"{what}: undo")
            raise
    return segments


@contextlib.contextmanager
def _naming(rank: int) -> Iterator[None]:
    """Name the rank whose memory a `HandleError` is about."""
    try:
        yield
    except HandleError as error:
        raise HandleError(f"memory of rank {rank}: {error}") from error


def _with_descriptors(handles: list[MemoryHandle], fds: list[Descriptor]) -> Exported:
    """Return the handles, each with the next descriptor if it is of `FD_KINDS`."""
    descriptors = iter(fds)
    return tuple((handle, next(descriptors, None) if handle.kind in FD_KINDS else None) for handle in handles)


def _require_same_signature(what: str, node: Group, offers: list[_Offer]) -> None:
    if len({offer.signature for offer in offers}) > 1:
        said = ", ".join(f"{offer.signature} on rank {rank}" for rank, offer in zip(node.ranks, offers, strict=True))
        raise InvalidUsageError(f"{what}: the ranks differ: {said}; a symmetric array is the same on all")
