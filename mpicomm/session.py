"""Session: what one communicator has on this rank: its groups, its device, its shared memory, and their teardown."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from mpicomm import environment, log
from mpicomm.cluster.agreement import Group, release_before_finalize, world_rank
from mpicomm.cluster.placement import Placement, find_placement
from mpicomm.devices.base import Backend, Event, Segment
from mpicomm.devices.handle import Kind
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.log import logger
from mpicomm.sharing.choose_handle import choose_kind
from mpicomm.sharing.segments import SharedSegments, share
from mpicomm.symmetric.array import SymmetricArray, checked_shape, require_contiguous, require_writable
from mpicomm.symmetric.events import SharedEvent
from mpicomm.symmetric.owner import Shared
from mpicomm.symmetric.registry import Mappings
from mpicomm.symmetric.signals import SignalPad, SignalPads

if TYPE_CHECKING:
    from mpi4py import MPI

_NODE_TAG = 1  # keeps the messages of a node's group apart from those of the whole communicator


T = TypeVar("T", bound=Shared)


class Session:
    """Groups, device and shared memory of one communicator. ``comm`` is private to it and freed by `close`."""

    def __init__(self, comm: MPI.Intracomm, group: Group, node: Group, placement: Placement, backend: Backend) -> None:
        self._comm = comm
        self._group = group
        self.node = node
        self.placement = placement
        self.backend = backend
        self.kind = cast(Kind, placement.here.handle)
        self.mappings = Mappings()
        self.pads = SignalPads(node, backend, self.kind)
        self._shared: list[Shared] = []
        self.beside: list[Shared] = [self.pads]
        """What is given back with the communicator and has no number among what ranks create together."""
        self._freed = False
        release_before_finalize(self)

    @classmethod
    def create(cls, comm: MPI.Intracomm, device: int | str, handle: str, timeout_s: float | None) -> Session:
        """Find nodes, devices and the best handle kind. Collective; a failure raises the same error on all ranks.

        ``comm`` is a duplicate of the user's communicator, and the session's own from now on.
        """
        group = Group(comm, range(comm.size), environment.usable_timeout_s(timeout_s))
        with _freed_on_failure(comm, group):
            return cls._create(comm, group, device, handle, timeout_s)

    @classmethod
    def _create(
        cls, comm: MPI.Intracomm, group: Group, device: int | str, handle: str, timeout_s: float | None
    ) -> Session:
        # What is wrong on one rank must not keep it from telling the others, so it is judged inside an exchange.
        group.agree("Communicator: timeout_s", lambda: environment.timeout_s(timeout_s))
        group.agree("Communicator: log", lambda: log.configure(world_rank()))
        placement = find_placement(group, device, handle)
        node = _node_of(group, placement)
        with _bound(group, placement) as backend:
            backend.make_current()
            request = placement.here.handle
            chosen = group.exchange("Communicator: choose handle", lambda: choose_kind(node, backend, request))
            placement = placement.with_handles(chosen)
            if node.rank == 0:
                _announce_handle(backend, request, *chosen[group.rank])
            return cls(comm, group, node, placement, backend)

    @classmethod
    def derive(cls, comm: MPI.Intracomm, placement: Placement, backend: Backend | None = None) -> Session:
        """Return the session of a communicator made from another, whose choices it keeps. Collective, as `create`.

        ``backend`` is this rank's if it has one already; it becomes the session's.
        """
        group = Group(comm, range(comm.size), placement.here.timeout_s)
        node = _node_of(group, placement)
        with _freed_on_failure(comm, group), _bound(group, placement, backend) as bound:
            return cls(comm, group, node, placement, bound)

    def empty(self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, zero: bool) -> SymmetricArray:
        """Allocate a symmetric array; see ``Communicator.empty`` and ``zeros``."""
        what = "zeros" if zero else "empty"
        checked: list[tuple[tuple[int, ...], np.dtype[Any]]] = []
        views: list[Any] = []

        def signature() -> Hashable:
            checked.append(checked_shape(shape, dtype))
            return _signature(*checked[0])

        def allocate() -> Segment:
            (sizes, element) = checked[0]
            nbytes = element.itemsize * int(np.prod(sizes, dtype=object))
            segment = self.backend.allocate(self.kind, nbytes)
            try:
                views.append(self.backend.view(segment, sizes, element))
                if zero:
                    # Before the exchange that tells the peers of this memory, or their first put could be zeroed away.
                    self.backend.zero(segment.pointer, nbytes)
            except BaseException:  # not even a Ctrl-C may leave it to nobody
                segment.close()
                raise
            return segment

        return self._array(what, allocate, signature, views)

    def register(self, array: Any) -> SymmetricArray:
        """Open existing memory to the peers; see ``Communicator.register``."""
        views: list[Any] = []

        def signature() -> Hashable:
            local = self.backend.asarray(array)
            require_contiguous(local, "array")
            require_writable(local, "array")
            checked_shape(local.shape, local.dtype)
            views.append(local)
            return _signature(local.shape, local.dtype)

        return self._array("register", lambda: self.backend.adopt(views[0]), signature, views, sealed=False)

    def _array(
        self,
        what: str,
        produce: Callable[[], Segment],
        signature: Callable[[], Hashable],
        views: list[Any],
        *,
        sealed: bool = True,
    ) -> SymmetricArray:
        """Share what ``produce`` returns; by then this rank's view of it is in ``views``."""
        self.require_usable(what)
        pads: list[SignalPad] = []

        def clear_and_produce() -> Segment:
            # Before the exchange that tells the peers of this array, or their first signal could be cleared away.
            self.pads.clear(pads[0])
            return produce()

        def share_in_node() -> SharedSegments:
            pads.append(self.pads.take())
            return share(self.node, self.backend, what, clear_and_produce, signature, sealed=sealed)

        try:
            segments = self._share_everywhere(what, share_in_node, signature)
        except Exception:
            for pad in pads:
                self.pads.give_back(pad)
            raise
        pointers = [segments[index].pointer for index in range(self.node.size)]
        number = self.mappings.add(pointers, self.node.rank, views[0].nbytes)
        array = SymmetricArray(self, segments, pads[0], views[0], number)
        self._shared.append(array)
        return array

    def _share_everywhere(
        self, what: str, share_in_node: Callable[[], SharedSegments], signature: Callable[[], Hashable]
    ) -> SharedSegments:
        """Share within each node, so that all ranks of all nodes succeed with one signature, or all fail."""
        if self.node is self._group:
            return share_in_node()
        opened: list[SharedSegments] = []

        def in_node() -> Hashable:
            opened.append(share_in_node())
            return signature()

        try:
            signatures = self._group.exchange(f"{what}: on all nodes", in_node)
            if len(set(signatures)) > 1:
                raise InvalidUsageError(f"{what}: the ranks differ: {signatures}; a symmetric array is the same on all")
        except Exception:
            for segments in opened:
                with contextlib.suppress(MpicommError):
                    segments.close(f"{what}: undo on all nodes")
            raise
        return opened[0]

    def keep(self, shared: T) -> T:
        """Give ``shared`` back with the communicator; all ranks keep the same in the same order. Local."""
        self._shared.append(shared)
        return shared

    def shared_event(self) -> SharedEvent:
        """Create an event per rank; see ``Communicator.shared_event``."""
        self.require_usable("shared_event")
        events: dict[int, Event] = {}
        rank = self.placement.rank

        def create() -> bytes:
            events[rank] = self.backend.create_event()
            return events[rank].export()

        def open_peers() -> None:
            for peer in self.placement.node_ranks:
                if peer != rank:
                    events[peer] = self.backend.open_event(exported[peer])

        try:
            exported = self._group.exchange("shared_event: create and export", create)
            self._group.agree("shared_event: open", open_peers)
        except Exception:
            for event in events.values():
                event.close()
            raise
        shared = SharedEvent(self, events)
        self._shared.append(shared)
        return shared

    def close_shared(self, shared: Shared, what: str) -> None:
        """Give back one array or event; see its ``close``."""
        if self._freed:
            return
        # Its place tells it from the others: all ranks have the same ones, in the same order.
        step = f"{what} {self._shared.index(shared)}: close"
        late = self._meet(step)
        try:
            self._give_back([shared], step, late)
        finally:
            self._shared.remove(shared)

    def check(self, stream: Any) -> None:
        """Wait for a stream, then raise what went wrong on it; see ``Communicator.check``."""
        self.require_usable("check")
        self.backend.synchronize(self.backend.stream(stream))
        self.backend.check()

    def require_usable(self, what: str) -> None:
        """Raise if the communicator was freed, or is unusable since an earlier error; local and cheap."""
        if self._freed:
            raise InvalidUsageError(f"{what}: the communicator was freed; create another")
        self._group.require_whole(what)
        if self.node is not self._group:
            self.node.require_whole(what)
        self.backend.check()

    def close(self) -> None:
        """Give everything back. Collective, blocking; local where the communicator is broken. Idempotent."""
        if self._freed:
            return
        late = self._meet("Free")
        self._freed = True
        try:
            self._give_back([*reversed(self._shared), *self.beside], "Free", late)
        finally:
            self._shared.clear()
            self.backend.close()
            if self.intact:
                self._comm.Free()

    @property
    def intact(self) -> bool:
        """Whether all ranks still answered when last asked; collective MPI calls would hang otherwise."""
        return not (self._group.broken or self.node.broken)

    def _meet(self, step: str) -> MpicommError | None:
        """Wait until all ranks are about to give the same back; if one does not come, return that for `_give_back`.

        Raises `PeerError` where they call different things: nothing has been given back then, and all can go on.
        """
        if self.intact:
            try:
                self._group.barrier(step)
            except MpicommError as error:
                if self.intact:
                    raise
                return error
        return None

    def _give_back(self, shared: Sequence[Shared], step: str, late: MpicommError | None) -> None:
        """Stop work, unmap the peers' memory, wait for all ranks to have done so, free own memory; raise ``late``.

        The wait keeps a rank from freeing memory that a slower peer still has mapped, or is still working on. No
        second one is needed: nothing of these is used again before the next exchange.
        """

        def stop_and_unmap() -> None:
            with contextlib.ExitStack() as then:
                for member in reversed(shared):
                    then.callback(member.close_peers)
                self.backend.synchronize()

        with contextlib.ExitStack() as last:
            for member in reversed(shared):
                last.callback(member.close_own)  # whatever fails before: a peer that is gone has nothing mapped
            if self.intact:
                self._group.agree(f"{step}: unmap", stop_and_unmap)
            else:
                stop_and_unmap()
            if late is not None:
                raise late

    def release(self) -> None:
        """Unmap the peers' memory before MPI_Finalize; local, without a barrier.

        Own memory is left to the end of the process: peers that are not yet here may still use it.
        """
        if self._freed:
            return
        self._freed = True
        with contextlib.suppress(MpicommError):
            self.backend.synchronize()
            for member in (*self._shared, *self.beside):
                member.close_peers()


def _node_of(group: Group, placement: Placement) -> Group:
    """Return the group of this rank's node: on one node the same, so that ranks that differ meet in one exchange."""
    if len(placement.node_ranks) == group.size:
        return group
    return group.subgroup(placement.node_ranks, tag=_NODE_TAG)


@contextlib.contextmanager
def _freed_on_failure(comm: MPI.Intracomm, group: Group) -> Iterator[None]:
    """Free ``comm`` if the block raises on all ranks alike; where somebody is missing that would wait for ever."""
    try:
        yield
    except Exception:
        if group.broken is None:
            comm.Free()
        raise


@contextlib.contextmanager
def _bound(group: Group, placement: Placement, backend: Backend | None = None) -> Iterator[Backend]:
    """Give every rank its backend, and close it again if that, or the block, raises on any. Collective.

    A ``backend`` that a rank has already is left to it.
    """
    backends: list[Backend] = []

    def bind() -> None:
        if backend is None:
            backends.append(placement.create_backend())

    try:
        group.agree("Communicator: bind device", bind)
        yield backend or backends[0]
    except Exception:
        for backend in backends:
            with contextlib.suppress(MpicommError):  # a device that has failed refuses this too; the cause is raised
                backend.close()
        raise


def _announce_handle(backend: Backend, request: str, kind: Kind, rejected: dict[str, str]) -> None:
    if request == kind:
        reason = "as asked"
    else:
        reason = "; ".join(f"not {other}: {why}" for other, why in rejected.items()) or "the best there is"
    say = logger.warning if kind == "staged" else logger.info
    say("device %s, memory handles %s: %s", backend.device, kind, reason)


def _signature(shape: tuple[int, ...], dtype: np.dtype[Any]) -> str:
    return f"shape={shape} dtype={dtype}"
