"""Create symmetric arrays and shared events: each rank provides its part, and opens the parts of its node."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mpicomm.cluster.agreement import require_same
from mpicomm.devices.cuda.types import Event, Segment
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import InvalidUsageError
from mpicomm.session import Session
from mpicomm.sharing.segments import SharedSegments, SignalPad, SuspendedContent, share
from mpicomm.symmetric.array import SymmetricArray, checked_shape, shareable_array


class SharedEvent:
    """One event per rank, open to all ranks of the node: CUDA interprocess events. ``comm.shared_event`` creates it.

    As with CUDA events, `wait` refers to the latest `record` at the time of its call, and returns at once if there was
    none. So a message or a barrier must tell the waiting rank that the peer has recorded.
    """

    def __init__(self, owner: Session, events: dict[int, Event]) -> None:
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


def empty(owner: Session, shape: int | Sequence[int], dtype: npt.DTypeLike, *, zero: bool) -> SymmetricArray:
    """Allocate a symmetric array; see ``Communicator.empty`` and ``zeros``."""

    def describe() -> str:
        return _signature(*checked_shape(shape, dtype))

    def provide() -> tuple[Segment, Any]:
        backend, (sizes, element) = owner.backend, checked_shape(shape, dtype)
        nbytes = element.itemsize * math.prod(sizes)
        with contextlib.ExitStack() as on_failure:
            segment = backend.allocate(owner.kind, nbytes)
            on_failure.callback(segment.close)
            view = backend.view(segment, sizes, element)
            if zero:
                # Before the exchange publishes the memory, because this could overwrite a peer's first put.
                backend.zero(segment.pointer, nbytes)
            on_failure.pop_all()
        return segment, view

    return _array(owner, "zeros" if zero else "empty", describe, provide, sealed=True)


def register(owner: Session, array: Any) -> SymmetricArray:
    """Open existing memory to the peers; see ``Communicator.register``."""
    view: Any = None

    def describe() -> str:
        nonlocal view
        view = shareable_array(owner.backend, array, "array")
        return _signature(*checked_shape(view.shape, view.dtype))

    return _array(owner, "register", describe, lambda: (owner.backend.adopt(view), view), sealed=False)


def shared_event(owner: Session) -> SharedEvent:
    """Create an event per rank; see ``Communicator.shared_event``."""
    owner.require_usable("shared_event")
    events: dict[int, Event] = {}
    rank = owner.placement.rank

    def create() -> bytes:
        events[rank] = owner.backend.create_event()
        return events[rank].export()

    def open_peers() -> None:
        for peer in owner.placement.node_ranks:
            if peer != rank:
                events[peer] = owner.backend.open_event(exported[peer])

    try:
        exported = owner.group.allgather("shared_event: create and export", create)
        owner.group.agree("shared_event: open", open_peers)
    except Exception:
        for event in events.values():
            event.close()
        raise
    return owner.keep(SharedEvent(owner, events))


def _array(
    owner: Session, what: str, describe: Callable[[], str], provide: Callable[[], tuple[Segment, Any]], *, sealed: bool
) -> SymmetricArray:
    """Let the ranks of each node open each other's parts, and return the array. Collective.

    ``describe`` checks the arguments, and ``provide`` returns the part and its view.
    """
    owner.require_usable(what)
    pads: list[SignalPad] = []
    view: Any = None

    def clear_and_provide() -> Segment:
        # Before the exchange publishes the array, because this could overwrite a peer's first signal.
        nonlocal view
        owner.pads.clear(pads[0])
        segment, view = provide()
        return segment

    def share_in_node() -> SharedSegments:
        pads.append(owner.pads.acquire(what))
        return share(owner.node, owner.backend, what, clear_and_provide, describe, sealed=sealed)

    try:
        segments = _share_on_all_nodes(owner, what, share_in_node, describe)
    except Exception:
        # All ranks fail together, so all release the pad, and have the same free pads afterwards. A rank that a
        # Ctrl-C takes out fails without the others. It must keep the pad, as its peers do.
        for pad in pads:
            owner.pads.release(pad)
        raise
    if sealed:
        segments.content = SuspendedContent(view.nbytes, of_user=True)
    number = owner.mappings.add(segments.pointers, owner.node.rank, view.nbytes)
    return owner.keep(SymmetricArray(owner, segments, pads[0], view, number, registered=not sealed))


def _share_on_all_nodes(
    owner: Session, what: str, share_in_node: Callable[[], SharedSegments], describe: Callable[[], str]
) -> SharedSegments:
    """Share within each node, so that all ranks of all nodes succeed with one signature, or all fail."""
    if owner.node is owner.group:
        return share_in_node()
    opened: list[SharedSegments] = []

    def in_node() -> str:
        opened.append(share_in_node())
        return describe()

    try:
        require_same(f"{what}: the array", owner.group.allgather(f"{what}: on all nodes", in_node))
    except Exception:
        for segments in opened:
            segments.undo(f"{what}: undo on all nodes")
        raise
    return opened[0]


def _signature(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"shape={shape} dtype={dtype}"
