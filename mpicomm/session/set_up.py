"""SetUp: the device and the groups of one communicator on this rank, which open at first need."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

from mpi4py import MPI

from mpicomm import environment, log
from mpicomm.activity.layout import CALLS_BY_MPI, KEY
from mpicomm.activity.page import CommunicatorRow, page
from mpicomm.cluster import process
from mpicomm.cluster.agreement import Group, broken_by
from mpicomm.cluster.monitored_barrier import monitored_barrier, private_copy
from mpicomm.cluster.placement import Placement, find_placement
from mpicomm.cluster.process import end_job_if_uncaught, release_before_finalize
from mpicomm.devices.base import Link
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import Kind, MemoryUse, sum_by_purpose
from mpicomm.devices.host import HostBackend
from mpicomm.errors import CollectiveTimeoutError, InvalidUsageError, MpicommError, PeerError
from mpicomm.sharing.choose_handle import choose_handles, node_of
from mpicomm.sharing.segments import AnyShared, Mappings, Shared, SignalPads
from mpicomm.sharing.suspension import Suspension

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicomm.recording.tracer import DeviceTracer, Tracer

_DOMAIN_TAG, _PART_TAG = 2, 4  # they keep messages of a part apart from the messages of the whole communicator
_NO_DEADLINE_S = 1e6  # days: no program waits so long, and clocks and sockets still accept the number


# Two threads may send the first messages of a communicator at once. Of two devices, one would replace the other, which
# nobody closes, and on which messages are in flight. The lock serves all communicators, most of which open no device.
_device_lock = threading.Lock()


class SetUp:
    """The device and the groups of the communicator ``comm``, and what it keeps until its end.

    The device opens at the first call that needs the device, which is local. `set_up` makes the rest at the first call
    that needs it, which is collective.

    `set_up` copies ``comm``, which the caller still owns. ``backend`` is this rank's device if it is already open.
    ``tracer`` takes the records of the communicator's calls; it is None if the environment asks for no records.
    """

    backend: HostBackend | GpuBackend
    """This rank's device, after `gpu` or `set_up`. It is no property, because every call on known arrays reads it."""
    group: Group
    """All ranks. It exists after `set_up`, as do the three attributes below."""
    node: Group
    """The ranks of this node: the same object as `group` if all ranks are on one node."""
    domain: Group
    """The ranks that one engine serves: the same object as `node` if kernels serve all ranks of the node."""
    pads: SignalPads
    mappings: Mappings
    """The symmetric arrays that are open."""

    # Class attributes, because most communicators of a program carry only host messages, which change none of them.
    device_tracer: DeviceTracer | None = None
    """Measures the work of recorded calls on the device."""
    peers_wait_elsewhere: Callable[[], bool] = staticmethod(lambda: False)
    """Returns whether peers wait for this rank in another call. They come to `close` after their deadline."""
    host_timeout: Callable[[], CollectiveTimeoutError | None] = staticmethod(lambda: None)
    """Returns the timeout of an earlier collective on host arrays."""
    has_stray_messages: Callable[[], bool] = staticmethod(lambda: False)
    """Returns whether messages between peer domains may be in flight that no receive takes."""
    begin_deferred: Callable[[], None] = staticmethod(lambda: None)
    """Begins the nonblocking calls that the program has started and that are deferred."""
    before_suspension: Callable[[], None] = staticmethod(lambda: None)
    """Frees memory to which no graph, no known call and no peer refers."""
    _private: MPI.Intracomm | None = None  # this session frees it
    _groups: tuple[Group, ...] = ()  # the groups that are different objects; none before `set_up`
    _part_error: CollectiveTimeoutError | PeerError | None = None  # of `await_some`
    _row: CommunicatorRow | None = None
    _suspension: Suspension | None = None
    _has_device = _rank_is_missing = _freed = _stray_messages = _has_no_deadline = False
    _is_unusable = False  # freed or suspended: every call on a device array reads it

    def __init__(
        self,
        comm: MPI.Intracomm,
        placement: Placement,
        backend: HostBackend | GpuBackend | None = None,
        *,
        tracer: Tracer | None = None,
    ) -> None:
        self.placement = placement
        self.tracer = tracer
        self.mappings = Mappings()
        self._comm = comm
        # Lists, because another thread may append: the thread that begins deferred calls may set up an engine.
        self._shared: list[Shared] = []
        self._local: list[Shared] = []
        self._number_of_row = placement.row_header.next_number()
        if backend is not None:
            self._use(backend)

    @property
    def row(self) -> CommunicatorRow:
        """The doctor reads this rank's calls here, from the first call on."""
        if self._row is None:
            self._row = CommunicatorRow()
            self._row.publish(self.placement.row_header, self._number_of_row)
        return self._row

    @classmethod
    def create(
        cls,
        comm: MPI.Intracomm,
        device: int | str,
        handle: str,
        timeout_s: float | None,
        completes: Callable[[], bool] = lambda: False,
        reductions: str = "auto",
        leaves: int = 64,
    ) -> Self:
        """Return a session that is set up, after it has found nodes, devices and the best handle kind.

        Collective; a failure raises the same error on all ranks. ``completes`` returns `RankPlace.completes`.
        """
        end_job_if_uncaught()
        page().set_world(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
        limit_s = environment.usable_timeout_s(timeout_s)
        with _private_group(comm, "Communicator", limit_s) as (private, group):

            def configure() -> environment.Recording | None:
                environment.timeout_s(timeout_s)  # here, so that a bad value on one rank is an error on all ranks
                log.configure(MPI.COMM_WORLD.rank)
                return environment.recording()

            wanted = group.allgather("Communicator: log", configure)
            tracer = None
            if any(wanted):
                from mpicomm.recording.tracer import Tracer  # few programs record

                tracer = Tracer.open(group, private, wanted)
            placement = find_placement(group, device, handle, completes, reductions, leaves)
            session = cls(comm, placement, tracer=tracer)
            session._open(private, group, is_first=True)
        return session

    @property
    def kind(self) -> Kind:
        """The kind of handle by which ranks open each other's memory."""
        return cast(Kind, self.placement.here.handle)

    @property
    def intact(self) -> bool:
        """Whether all ranks still answered in the last allgather; collective MPI calls would hang otherwise."""
        return not (self._rank_is_missing or (self._groups and any(group.broken for group in self._groups)))

    def set_up(self, what: str) -> Self:
        """Return this session with its device and groups. Collective the first time, else local.

        ``what`` names the call in errors. A failure raises the same error on all ranks.
        """
        # Else another thread may begin them during this call. It would set up memory in steps that other ranks make
        # before this call, and enqueue kernels after those of this call.
        self.begin_deferred()
        if not self._groups:
            self._require_open(what)
            limit_s = _NO_DEADLINE_S if self._has_no_deadline else self.placement.here.timeout_s
            with _private_group(self._comm, what, limit_s, self.absence_reason) as made:
                self._open(*made)
        return self

    def await_all(self, what: str) -> None:
        """Wait until all ranks have called ``what``. Collective. Raises as `monitored_barrier`, and stays usable."""
        comm = self._comm if self._private is None else self._private
        try:
            monitored_barrier(comm, what, self.placement.here.timeout_s, self.absence_reason)
        except BaseException:
            self._stray_messages |= comm is self._private
            raise

    def await_some(self, what: str, ranks: Sequence[int]) -> bool:
        """Wait until these ranks, among them this one, have called ``what``. Return False at once before `set_up`.

        Collective over the ranks. Raises as `Group.allgather`. After an error all later calls of this rank raise,
        because a call with other ranks could take the message of a late rank for one of its own.
        """
        if self._private is None or self.placement.rank not in ranks:
            return False
        earlier = self._part_error
        if earlier is not None:
            raise type(earlier)(
                f"{what}: an earlier call has failed ({earlier}): make this call on a duplicate", ranks=earlier.ranks
            )
        part = self.group.subgroup(ranks, tag=_PART_TAG)
        part.absence_reason = self.absence_reason
        try:
            part.barrier(what)
        except BaseException as error:
            self._part_error, self._stray_messages = broken_by(error, what, self.placement.rank), True
            raise
        return True

    @contextlib.contextmanager
    def without_deadline(self) -> Iterator[None]:
        """Open a ``with`` block in which this rank waits for the others as long as MPI does, also in `set_up`."""
        self._has_no_deadline = True
        for group in self._groups:
            group.timeout_s = _NO_DEADLINE_S
        try:
            yield
        finally:
            self._has_no_deadline = False
            for group in self._groups:
                group.timeout_s = self.placement.here.timeout_s

    @property
    def private(self) -> MPI.Intracomm:
        """The communicator that carries only messages of mpicomm, after `set_up`."""
        assert self._private is not None
        return self._private

    def require_gpu(self, operation: str) -> None:
        """Raise `InvalidUsageError` if the communicator is on the cpu: then it raises on all ranks. Local."""
        if isinstance(self.placement.here.device, str):
            raise InvalidUsageError(
                f'{operation}: the buffers are on a GPU, the communicator is on the cpu: create it with device="auto"'
            )

    def gpu(self, operation: str) -> GpuBackend:
        """Return this rank's GPU, which it opens if it is not open yet. Local.

        Raises `InvalidUsageError` if the communicator is on the cpu, was freed or is suspended. Raises `HandleError` or
        `BackendUnavailableError` if the device cannot be opened.
        """
        self._require_open(operation)
        self.require_gpu(operation)
        if not self._has_device:
            self._open_device()
        assert not isinstance(self.backend, HostBackend)
        return self.backend

    def keep(self, shared: AnyShared) -> AnyShared:
        """Release ``shared`` with the communicator; all ranks keep the same things in the same order. Local."""
        self._shared.append(shared)
        return shared

    def keep_local(self, member: Shared) -> None:
        """Release ``member`` with the communicator. Unlike with `keep`, the other ranks need not have it. Local."""
        self._local.append(member)

    def links(self) -> tuple[Link, ...]:
        """Return this rank's link to the memory of each rank, after `set_up`; local."""
        placement = self.placement
        links = [Link("other node")] * len(placement.places)
        links[placement.rank] = Link("self")
        for rank in placement.node_ranks:
            if rank != placement.rank:
                links[rank] = self.backend.link(placement.places[rank].device_uuid, self.kind)
        return tuple(links)

    def memory_use(self) -> tuple[MemoryUse, ...]:
        """Return the memory that this communicator has set up on this rank, by purpose. Local."""
        own = self.backend.memory_use() if self._has_device else ()
        saved = MemoryUse("suspended contents", host_nbytes=self._suspension.host_nbytes if self._suspension else 0)
        members = (use for member in (*self._local, *self._shared) for use in member.memory_use())
        return sum_by_purpose([*own, *members, saved])

    def require_usable(self, what: object) -> None:
        """Raise if the communicator was freed, is suspended, or is broken; after `set_up`. Local and cheap.

        ``what`` is formatted only for an error.
        """
        if self._is_unusable:
            self._require_open(what)
        for group in self._groups:
            # `require_intact` makes these two checks, too. Here they save a call, because every known call comes here.
            if process.is_forked or group.broken is not None:
                group.require_intact(what)
        self.backend.check()

    def require_intact(self, what: str) -> None:
        """Raise if an earlier error broke the communicator. Unlike `require_usable` it accepts a suspension. Local."""
        for group in self._groups:
            group.require_intact(what)
        if self._has_device:
            self.backend.check()

    def call_by_mpi(self, rank: int) -> str:
        """Return the call by MPI of a rank that has not come to this rank's call; "" if it is only late.

        Local. MPI carries out most calls on the host, without notice to other ranks. But each process publishes them on
        its page for the doctor, which ranks of the same node and container can read, in milliseconds.
        """
        if rank not in self.placement.node_ranks or rank == self.placement.rank:
            return ""
        from mpicomm.activity.reading import read_calls  # only for errors

        own = self.row.words
        calls = read_calls(self.placement.places[rank].pid, own[KEY])
        # Ranks make the same calls in the same order, and a rank that is only late has begun no more calls by MPI.
        if calls is None or calls.since_ns is not None or calls.by_mpi <= own[CALLS_BY_MPI] or not calls.last:
            return ""
        return f"{calls.last} by MPI"

    def absence_reason(self, ranks: Sequence[int]) -> str:
        """Return a text that names the calls by MPI in which missing ``ranks`` are; "" if they are only late."""
        calls = [(rank, self.call_by_mpi(rank)) for rank in ranks]
        return "; ".join(f"rank {rank} is in {call}, or has left it" for rank, call in calls if call)

    @property
    def is_suspended(self) -> bool:
        """Whether device memory is freed until `resume`. The same on all ranks."""
        return self._suspension is not None

    def shorten_deadline(self, limit_s: float) -> None:
        """Let later steps wait at most ``limit_s`` seconds for a rank. Local."""
        for group in self._groups:
            group.timeout_s = min(group.timeout_s, limit_s)

    def _require_unfreed(self, what: object) -> None:
        if self._freed:
            raise InvalidUsageError(f"{what}: the communicator was freed; create another")

    def _require_open(self, what: object) -> None:
        self._require_unfreed(what)
        if self.is_suspended:
            raise InvalidUsageError(f"{what}: the communicator is suspended: call resume() on all ranks first")

    def _open_device(self) -> None:
        with _device_lock:
            if not self._has_device:
                self._use(self.placement.create_backend())

    def _use(self, backend: HostBackend | GpuBackend) -> None:
        self.backend = backend
        self._has_device = True
        if self.tracer is not None and not isinstance(backend, HostBackend):
            from mpicomm.recording.tracer import DeviceTracer

            self.device_tracer = DeviceTracer(self.tracer, backend)

    def _open(self, private: MPI.Intracomm, group: Group, *, is_first: bool = False) -> None:
        """Open the device of every rank, and own ``private`` and ``group``. Collective.

        The first communicator of its ranks, ``is_first``, chooses the handle kinds. If a rank fails, all ranks close a
        device that this call has opened.
        """
        had_device = self._has_device
        try:
            group.agree("Communicator: bind device", self._open_device)
            if is_first:
                self.backend.make_current()
                self.placement = choose_handles(group, self.placement, self.backend)
        except Exception:
            if self._has_device and not had_device:
                self._has_device = False
                with contextlib.suppress(MpicommError):  # a device that has failed refuses this, too
                    self.backend.close()
            raise
        self.group = group
        self.node = node_of(group, self.placement)
        if not isinstance(self.backend, HostBackend):
            self.backend.kind = self.kind
        self.pads = SignalPads(self.node, self.backend, self.kind)
        self.keep_local(self.pads)
        self._private = private
        members = self.placement.domain_ranks
        self.domain = self.node if len(members) == self.node.size else group.subgroup(members, tag=_DOMAIN_TAG)
        self._groups = tuple({id(each): each for each in (group, self.node, self.domain)}.values())
        for each in self._groups:
            each.absence_reason = self.absence_reason
        release_before_finalize(self)


@contextlib.contextmanager
def _private_group(
    comm: MPI.Intracomm, what: str, limit_s: float, absence_reason: Callable[[Sequence[int]], str] = lambda ranks: ""
) -> Iterator[tuple[MPI.Intracomm, Group]]:
    """Open a ``with`` block with a private copy of ``comm``, and the group of its ranks. Collective.

    The copy is freed if the block raises on all ranks. With a rank missing, that would wait for ever.
    """
    private = private_copy(comm, what, limit_s, absence_reason)
    group = Group(private, range(private.size), limit_s)
    try:
        yield private, group
    except Exception:
        if group.broken is None:
            private.Free()
        raise
