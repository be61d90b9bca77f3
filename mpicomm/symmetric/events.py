"""SharedEvent: a point in the stream of a rank, for which the streams of the other ranks of the node can wait."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from mpicomm.devices.base import Event
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.symmetric.owner import Owner


class SharedEvent:
    """One event per rank, open to all ranks of the node: CUDA interprocess events. ``comm.shared_event`` creates it.

    As with CUDA events, `wait` refers to the latest `record` at the time of its call, and returns at once if there was
    none. So a message or a barrier must tell the waiting rank that the peer has recorded.
    """

    def __init__(self, owner: Owner, events: dict[int, Event]) -> None:
        self._owner = owner
        self._events = events
        self.closed = False

    def __repr__(self) -> str:
        return f"<SharedEvent {'closed' if self.closed else f'device={self._owner.placement.here.device!r}'}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidUsageError("a SharedEvent cannot be pickled: every rank has one from comm.shared_event()")

    def record(self, stream: Any = None) -> None:
        """Mark the work that ``stream`` has at this call on this rank. Local, stream-ordered."""
        rank = self._owner.placement.rank
        self._event(rank).record(self._owner.backend.stream(stream))

    def wait(self, peer: int, stream: Any = None) -> None:
        """Make ``stream`` wait for the latest `record` of ``peer``. Local, stream-ordered.

        On the host, where calls block, `record` and `wait` are memory fences. Raises `InvalidUsageError` for a rank
        that is not on this node.
        """
        self._event(peer).wait(self._owner.backend.stream(stream))

    def close(self) -> None:
        """Release the events. Collective, blocking. A second call does nothing."""
        if not self.closed:
            self._owner.close_shared(self, "SharedEvent")

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return nothing: an event has no memory of mpicomm."""
        return ()

    def close_peers(self) -> None:
        """Close the peers' events; local, the first step of a close."""
        self.closed = True
        for rank in [rank for rank in self._events if rank != self._owner.placement.rank]:
            self._events.pop(rank).close()

    def close_own(self) -> None:
        """Close this rank's event; local, the last step of a close."""
        for event in self._events.values():
            event.close()
        self._events.clear()

    def _event(self, rank: int) -> Event:
        if self.closed:
            raise InvalidUsageError("this SharedEvent is closed; create another with comm.shared_event()")
        self._owner.require_usable("shared event")
        placement = self._owner.placement
        return self._events[placement.node_ranks[placement.node_index_of(rank)]]
