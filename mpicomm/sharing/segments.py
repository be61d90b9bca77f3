"""Memory that the ranks of a node open for each other: allocate, export, exchange, open, and close again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from mpicomm.cluster.agreement import Group
from mpicomm.devices.base import Backend, Segment
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import SEALED_KINDS, MemoryHandle
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
    packet: bytes
    address: Address | None  # for the exchange of descriptors, if the segment has a descriptor


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
        own_fd: Descriptor | None = None

        def export() -> _Offer:
            nonlocal swap, own_fd
            mine = signature()
            segments._segments[node.rank] = segment = produce()
            handle, own_fd = backend.export(segment)
            if own_fd is not None:
                temporary.callback(own_fd.close)
                swap = temporary.enter_context(FdExchange(node.rank, node.size))
            return _Offer(mine, handle.pack(), swap.address if swap else None)

        def open_peers(offers: list[_Offer]) -> None:
            received: dict[int, Descriptor] = {}
            if swap is not None and own_fd is not None:
                addresses = [offer.address for offer in offers if offer.address]
                # Half the deadline, so that the ranks have time to agree that a descriptor has not come.
                received = swap.swap(addresses, own_fd, node.timeout_s / 2)
                for fd in received.values():
                    temporary.callback(fd.close)
            for index, offer in enumerate(offers):
                if index != node.rank:
                    try:
                        handle, descriptor = MemoryHandle.unpack(offer.packet), received.get(index)
                        if sealed and descriptor is not None and handle.kind in SEALED_KINDS:
                            require_sealed(descriptor)
                        segments._segments[index] = backend.open(handle, descriptor)
                    except HandleError as error:
                        raise HandleError(f"memory of rank {node.ranks[index]}: {error}") from error

        try:
            offers = node.exchange(f"{what}: allocate and export", export)
            _require_same_signature(what, node, offers)
        except Exception:
            # No peer has opened the segment yet. No barrier, because ranks that made another call do not come to it.
            with contextlib.suppress(MpicommError):
                segments.close_own()
            raise
        try:
            node.agree(f"{what}: open", lambda: open_peers(offers))
        except Exception:
            # All ranks meet here, or the group is broken and its barrier fails at once.
            with contextlib.suppress(MpicommError):
                segments.close(f"{what}: undo")
            raise
    return segments


def _require_same_signature(what: str, node: Group, offers: list[_Offer]) -> None:
    if len({offer.signature for offer in offers}) > 1:
        said = ", ".join(f"{offer.signature} on rank {rank}" for rank, offer in zip(node.ranks, offers, strict=True))
        raise InvalidUsageError(f"{what}: the ranks differ: {said}; a symmetric array is the same on all")
