"""Owner: the communicator of symmetric memory, as arrays and events see it."""

from __future__ import annotations

from typing import Protocol

from mpicomm.cluster.placement import Placement
from mpicomm.devices.base import Backend
from mpicomm.symmetric.registry import Mappings
from mpicomm.symmetric.signals import SignalPads


class Shared(Protocol):
    """Memory or events that ranks give back in two steps: all unmap the peers' part, then each frees its own part."""

    def close_peers(self) -> None:
        """Unmap the peers' part; local."""

    def close_own(self) -> None:
        """Free this rank's part; local, after every peer's `close_peers`."""


class Owner(Protocol):
    """The part of a session that symmetric arrays and shared events need; `mpicomm.session.Session` has it."""

    placement: Placement
    backend: Backend
    mappings: Mappings
    pads: SignalPads

    def require_usable(self, what: str) -> None:
        """Raise where the communicator was freed or is broken; local and cheap."""

    def close_shared(self, shared: Shared, what: str) -> None:
        """Give ``shared`` back; collective, blocking."""
