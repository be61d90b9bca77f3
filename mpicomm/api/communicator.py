"""Communicator: an mpi4py communicator with ranks that can open each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from mpicomm.api.calls_by_mpi import HostStaging, ObjectCalls, Probes
from mpicomm.api.collectives import (
    BlockingCollectives,
    NeighborCollectives,
    NonblockingCollectives,
    PersistentCollectives,
)
from mpicomm.api.constructors import Constructors
from mpicomm.api.lifetime import Lazy, Lifetime, by_handle, handle_of
from mpicomm.api.memory import MemoryCalls
from mpicomm.api.point_to_point import PointToPoint
from mpicomm.api.products import ProductCalls
from mpicomm.api.redistribution import RedistributionCalls
from mpicomm.collectives.host.selection import FastPathCheck
from mpicomm.devices.base import Link
from mpicomm.devices.handle import MemoryUse
from mpicomm.dispatch import in_stream_order
from mpicomm.dispatch.dispatcher import Dispatcher, checks_of
from mpicomm.dispatch.location_votes import needs_votes
from mpicomm.errors import InvalidUsageError
from mpicomm.products.calls import Products
from mpicomm.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicomm.api.internals import Internals
    from mpicomm.messages.calls import Messages
    from mpicomm.recording.record import Statistics


def predefined(name: str) -> Any:
    """Return the predefined communicator ``name`` of ``mpi4py.MPI``. Pickled communicators refer to this function."""
    return getattr(MPI, name)


@dataclass(frozen=True)
class RankInfo:
    """Where a rank is, which device it uses, and how it reaches the memory of each rank of the communicator."""

    rank: int
    host: str
    pid: int
    node: int
    device: int | str
    device_name: str
    device_uuid: bytes
    pci_bus_id: str
    numa_node: int
    handle: str
    rejected: dict[str, str]
    """The better handle kinds that do not work, each with the reason."""
    links: tuple[Link, ...]
    internode: str = ""
    """The engine that moves data between peer domains: "mapped", "nccl", "mpi" or "pinned". One domain has ""."""
    internode_rejected: dict[str, str] = field(default_factory=dict)
    """The better engines that do not work, each with the reason."""
    memory: tuple[MemoryUse, ...] = ()
    """The memory that the library has set up for this communicator on this rank, by purpose.

    It counts symmetric arrays and the memory of calls, but neither memory of the caller nor mapped memory of peers.
    """
    suspended: bool = False
    """Whether the driver has the device memory of `memory`, from `Communicator.suspend` to `Communicator.resume`."""
    products: tuple[str, ...] = ()
    """From which size on matrix products overlap with their collective, after the first collective on GPUs."""
    reductions: str = "auto"
    """Who reduces host arrays: "auto", the fastest, or "ordered", mpicomm in rank order."""
    order: str = "stream"
    """How calls on device arrays return: "stream", in stream order, or "complete", for all streams; see `install`."""


class Communicator(
    BlockingCollectives,
    NonblockingCollectives,
    PersistentCollectives,
    PointToPoint,
    Probes,
    ProductCalls,
    RedistributionCalls,
    ObjectCalls,
    MemoryCalls,
    Constructors,
    Lifetime,
    HostStaging,
):
    """An ``MPI.Intracomm`` with ranks that can open each other's memory. The constructor is collective, like ``Dup``.

    The communicator works on a duplicate of ``comm``, so its messages cannot mix with other messages. `Free` frees the
    duplicate.

    ``device`` is "auto", "cpu" or the ordinal of this rank's GPU. With "auto" the ranks of a node share the visible
    GPUs by local rank. A rank keeps its GPU in later communicators. If some rank sees no GPU, all ranks use the cpu. A
    GPU becomes the current device of the calling thread.

    ``handle`` is how ranks open memory: "ipc", "fd", "fabric", "staged", or "auto". "auto" takes the best kind that
    works between all ranks of the node. After ``timeout_s`` seconds (30, or MPICOMM_TIMEOUT) a missing rank is an
    error. With ``reductions="ordered"`` (or MPICOMM_REDUCTIONS) MPI reduces no host arrays of types and operations that
    mpicomm has, so each result has the same bits on all ranks and in every run; small calls then take many times as
    long. ``leaves``, a power of two, is the number of leaves of the tree of ``order="tree"``: see ``Allreduce``. All
    ranks pass the same ``handle``, ``timeout_s``, ``reductions`` and ``leaves``.

    The constructor raises the same error on all ranks: `InvalidUsageError` for bad arguments, `BackendUnavailableError`
    if the device cannot be used, `HandleError` if no handle kind works, `CollectiveTimeoutError` if a rank does not
    come.

    A Communicator inherits all calls of an mpi4py communicator. ``Dup``, ``Split``, ``Create_cart`` and the like return
    Communicators on the same devices, which set themselves up at their first use. If they have a topology, they also
    have MPI's calls for it. Intercommunicators are mpi4py's, and their calls on device arrays go through pinned host
    memory. `Win` makes windows of device memory. ``MPI.Win``, ``MPI.File`` and ``MPI.Message.Probe`` check their
    buffers only after `install`: pass them host memory.

        with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
            x, y = cp.ones(8), cp.empty(8)
            comm.Allreduce(x, y)
            comm.check()
    """

    _is_installed = False
    """Whether `install` has made the communicator, or one from which it is made."""

    def __new__(
        cls,
        comm: MPI.Intracomm = MPI.COMM_WORLD,
        *,
        device: int | str = "auto",
        handle: str = "auto",
        timeout_s: float | None = None,
        reductions: str = "auto",
        leaves: int = 64,
    ) -> Self:
        """Duplicate ``comm`` twice, for the user's messages and for mpicomm's messages, and set up."""
        if not MPI.Is_initialized() or MPI.Is_finalized():
            state = (
                "has ended" if MPI.Is_initialized() else "does not run yet: call MPI.Init() or MPI.Init_thread() first"
            )
            raise InvalidUsageError(f"Communicator: MPI {state}")
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            shown = "MPI.COMM_NULL" if isinstance(comm, MPI.Comm) and comm == MPI.COMM_NULL else repr(comm)
            raise InvalidUsageError(f"comm={shown} is no intracommunicator: pass MPI.COMM_WORLD or one made from it")
        plain = MPI.Intracomm(comm)
        session = Session.create(plain, device, handle, timeout_s, reductions=reductions, leaves=leaves)
        made: Any = cls._classes[plain.Get_topology()] if cls is Communicator else cls
        session.group.barrier("Communicator")  # because MPI waits without a limit
        self: Self = MPI.Intracomm.__new__(made, plain.Dup())
        self._begin(session)
        self._unfreed = True
        return self

    @classmethod
    def installed(cls, comm: MPI.Intracomm, session: Session, name: str) -> Self:
        """Return a Communicator with the MPI handle of ``comm``, which MPI frees, for `install`. Local.

        ``name`` is its name in ``mpi4py.MPI``. The Communicator equals ``comm`` and has the same attributes, because it
        makes no duplicate for the user's messages.
        """
        self = MPI.Intracomm.__new__(cls, comm)
        self._begin(session)
        self._name_in_mpi = name
        self._is_installed = True
        return self

    def _begin(self, session: Session) -> None:
        self._session = session
        self._gpu = session.gpu
        by_handle[handle_of(self)] = self
        if session.tracer is not None:
            from mpicomm.observation import record_calls  # few programs record

            record_calls(self, session.tracer)

    _row = Lazy(lambda comm: comm._session.row.words)
    _collectives = Lazy(lambda comm: Dispatcher(comm, comm._session))
    _nonblocking_comm = Lazy(lambda comm: comm._collectives.nonblocking_comm())
    _in_stream_order = Lazy(lambda comm: partial(in_stream_order.exchange, comm._collectives.engines))
    _products = Lazy(lambda comm: Products(comm._collectives, comm._session))

    @Lazy
    def _fast_path(self) -> dict[str, FastPathCheck]:
        # Many duplicates carry a few small calls of the host, which need no dispatcher.
        placement = self._session.placement
        return self._collectives.fast_path if needs_votes(placement) else checks_of(placement)

    @Lazy
    def _messages(self) -> Messages:
        from mpicomm.messages.calls import Messages  # few programs send messages of GPU arrays

        messages = Messages(self, self._session.placement, self._session.gpu)
        self._session.keep_local(messages.rendezvous)
        self._session.before_suspension = messages.rendezvous.reset
        return messages

    @Lazy
    def _internals(self) -> Internals:
        from mpicomm.api.internals import Internals  # few programs use it

        return Internals(self, self._session, self._collectives.engines)

    def __repr__(self) -> str:
        if self == MPI.COMM_NULL:
            return f"<mpicomm.{type(self).__name__} freed>"
        placement = self._session.placement  # MPI's answers end with MPI_Finalize
        kind = placement.here.handle
        return (
            f"<mpicomm.{type(self).__name__} rank {placement.rank} of {len(placement.places)} device={self.device!r} "
            f"handle={kind!r}>"
        )

    def __reduce__(self) -> Any:
        # mpi4py pickles a predefined communicator as its name in mpi4py.MPI.
        return (predefined, (self._name_in_mpi,)) if self._name_in_mpi else super().__reduce__()

    @property
    def device(self) -> int | str:
        """This rank's device ordinal, or "cpu"."""
        return self._session.placement.here.device

    @property
    def handle(self) -> str:  # type: ignore[override]
        """How the ranks of this node open memory: "ipc", "fd", "fabric", "staged", or "memfd" on the cpu.

        It hides mpi4py's attribute of that name. ``MPI.Intracomm(comm).handle`` is MPI's handle of the communicator.
        The communicators of `install` have MPI's handle here, because programs that know only mpi4py expect it.
        """
        return handle_of(self) if self._is_installed else self._session.placement.here.handle

    @property
    def leaves(self) -> int:
        """Number of leaves of the tree of ``order="tree"``. Each rank holds ``leaves // size`` of them."""
        return self._session.placement.here.leaves

    @property
    def local_rank(self) -> int:
        """This rank's index among the ranks of its node."""
        return self._session.placement.local_rank

    @property
    def local_size(self) -> int:
        """Number of ranks on this node."""
        return len(self._session.placement.node_ranks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self._session.placement.nodes)

    def check(self, stream: Any = None) -> None:
        """Wait for ``stream``, then raise the error of an earlier stream-ordered call, if any. Local, blocking.

        Raises `CollectiveTimeoutError` with the number of the rank that did not come, and `PeerError` if ranks called
        different things. The communicator is unusable after either error.
        """
        self._session.check(stream)

    def Get_info(self) -> MPI.Info:
        """Return a new info object with the hints of the communicator; see mpi4py. Local.

        Its ``mpi_memory_alloc_kinds`` answers as MPI 4.1 defines which memory calls take: on GPUs, whatever MPI says,
        also "cuda:device" and "cuda:host".
        """
        info, key = super().Get_info(), "mpi_memory_alloc_kinds"
        kinds = (info.Get(key) or "system,mpi").split(",")
        if isinstance(self._session.placement.here.device, int):
            kinds += [kind for kind in ("cuda:device", "cuda:host") if kind not in kinds]
        info.Set(key, ",".join(kinds))
        return info

    def describe(self) -> RankInfo:
        """Return where this rank is, how it reaches the other ranks, and the memory that its calls have set up.

        The first call that sets up the communicator is collective. Later calls are local.
        """
        session = self._session.set_up("describe")
        placement, here = session.placement, session.placement.here
        device = here.devices[here.device] if isinstance(here.device, int) else None
        internode, internode_rejected = self._collectives.engines.internode("describe")
        return RankInfo(
            rank=self.rank,
            host=here.host,
            pid=here.pid,
            node=placement.node_index,
            device=here.device,
            device_name=device.name if device else "cpu",
            device_uuid=here.device_uuid,
            pci_bus_id=device.pci_bus_id if device else "",
            numa_node=device.numa_node if device else -1,
            handle=session.kind,
            rejected=here.rejected,
            links=session.links(),
            internode=internode,
            internode_rejected=internode_rejected,
            memory=session.memory_use(),
            suspended=session.is_suspended,
            products=self._products.describe(),
            reductions=here.reductions,
            order="complete" if here.completes else "stream",
        )

    def stats(self) -> Statistics:
        """Return the number, bytes and times of this rank's calls of this communicator so far. Local.

        ``rows`` has an entry for each operation, size class and algorithm. ``slow_ways`` has the slow paths that calls
        took. ``print(comm.stats())`` shows both as tables. Device times are times of finished calls, and `check` waits
        for calls. Raises `InvalidUsageError` if the program was started without MPICOMM_STATS and MPICOMM_TRACE.
        """
        tracer = self._session.tracer
        if tracer is None:
            raise InvalidUsageError(
                "stats: calls are not counted: set MPICOMM_STATS=1 or MPICOMM_TRACE when the program starts"
            )
        tracer.recorder.flush()
        return tracer.counts.statistics()


class CartCommunicator(Communicator, NeighborCollectives, MPI.Cartcomm):
    """A Communicator of a Cartesian grid, with the calls of ``MPI.Cartcomm``."""

    def Sub(self, remain_dims: Sequence[bool]) -> CartCommunicator:
        """Make communicators of the parts of the grid along the dimensions that remain."""
        self._after_barrier("Sub")
        return self._adopt(MPI.Cartcomm(self).Sub(remain_dims))


class GraphCommunicator(Communicator, NeighborCollectives, MPI.Graphcomm):
    """A Communicator of a graph, with the calls of ``MPI.Graphcomm``."""


class DistGraphCommunicator(Communicator, NeighborCollectives, MPI.Distgraphcomm):
    """A Communicator of a graph, with the calls of ``MPI.Distgraphcomm``. Each rank knows only its own neighbours."""


Communicator._classes = {
    MPI.UNDEFINED: Communicator,
    MPI.CART: CartCommunicator,
    MPI.GRAPH: GraphCommunicator,
    MPI.DIST_GRAPH: DistGraphCommunicator,
}
