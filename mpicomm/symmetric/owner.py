"""Owner: the parts of a communicator's session that its symmetric arrays and shared events use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar, runtime_checkable

from mpicomm.cluster.agreement import Group
from mpicomm.cluster.placement import Placement
from mpicomm.devices.base import Backend
from mpicomm.devices.handle import Kind, MemoryUse
from mpicomm.sharing.segments import SharedSegments
from mpicomm.symmetric.registry import Mappings
from mpicomm.symmetric.signals import SignalPads


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
    """A `Suspendable`: one segment of each rank, which the other ranks have opened."""

    closed = False

    def __init__(self, purpose: str, kind: Kind, segments: SharedSegments) -> None:
        self._purpose = purpose
        self._kind = kind
        self._segments = segments
        self.pointers = segments.pointers

    def memory_use(self) -> Iterable[MemoryUse]:
        return (MemoryUse.of_kind(self._purpose, self._kind, self._segments.own.nbytes),)

    def memories(self) -> Iterable[SharedSegments]:
        return (self._segments,)

    def close_peers(self) -> None:
        self.closed = True
        self._segments.close_peers()

    def close_own(self) -> None:
        self._segments.close_own()


AnyShared = TypeVar("AnyShared", bound=Shared)


class Owner(Protocol):
    """The part of a session that symmetric arrays and shared events need; `mpicomm.session.Session` has it."""

    placement: Placement
    mappings: Mappings
    group: Group
    """All ranks of the communicator."""
    node: Group
    """The ranks of this node: the same object as `group` if all ranks are on one node."""
    pads: SignalPads

    @property
    def backend(self) -> Backend:
        """This rank's device."""

    @property
    def kind(self) -> Kind:
        """The kind of handle by which ranks open each other's memory."""

    def require_usable(self, what: str) -> None:
        """Raise if the communicator was freed or is broken; local and cheap."""

    def keep(self, shared: AnyShared) -> AnyShared:
        """Release ``shared`` with the communicator, unless it is closed before; local.

        All ranks keep the same things in the same order.
        """

    def close_shared(self, shared: Shared, what: str) -> None:
        """Release ``shared``; collective, blocking."""
