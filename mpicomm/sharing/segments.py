"""Memory that the ranks of a node open for each other: allocate, export, exchange, open, and close again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import cast

from mpicomm.cluster.agreement import Group
from mpicomm.devices.base import Backend, Segment, VirtualMemory
from mpicomm.devices.handle import Exported
from mpicomm.errors import MpicommError
from mpicomm.sharing.handle_exchange import HandleExchange


@dataclass(frozen=True)
class SuspendedContent:
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
        if self.node.are_apart:
            self.close_peers()
            self.close_own()
            return
        with contextlib.suppress(MpicommError):  # the group is broken, so its barrier fails at once
            self.close(step)

    @property
    def peers(self) -> list[int]:
        """The indices of the peers whose segments are mapped."""
        return [index for index in self._segments if index != self.node.rank]

    def virtual(self, index: int) -> VirtualMemory:
        """Return a segment whose memory can go and come back at its addresses."""
        return cast(VirtualMemory, self._segments[index])


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

    def export() -> tuple[Hashable, list[Exported]]:
        mine = signature()
        segments[node.rank] = segment = produce()
        return mine, [backend.export(segment)]

    def open_peer(index: int, memories: list[Exported]) -> None:
        (parts,) = memories
        segments[index] = backend.open(parts)

    with HandleExchange(node, what) as exchange:
        try:
            exchange.offer(export)
        except Exception:
            # No peer has opened the segment yet. No barrier, because ranks that made another call do not come to it.
            with contextlib.suppress(MpicommError):
                shared.close_own()
            raise
        try:
            exchange.open(open_peer, sealed=sealed)
        except Exception:
            shared.undo(f"{what}: undo")
            raise
    return shared


def reopen(node: Group, backend: Backend, what: str, memories: Sequence[SharedSegments]) -> None:
    """Let every rank of ``node`` open the new memory that a suspension has taken for all peers. Collective, blocking.

    All ranks pass the same memories. A failure on any rank raises the same error on all ranks.
    """

    def open_peer(index: int, exported: list[Exported]) -> None:
        for shared, parts in zip(memories, exported, strict=True):
            shared.virtual(index).reopen(parts)

    with HandleExchange(node, what) as exchange:
        exchange.offer(lambda: (len(memories), (backend.export(shared.own) for shared in memories)))
        exchange.open(open_peer, sealed=True)
