"""The calls of a Communicator that make other communicators, with and without a topology."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mpi4py import MPI

from mpicomm.activity.page import begin_mpi_call, mpi_call_number, page
from mpicomm.api.topologies import edges_of, edges_of_grid, read_edges, read_graph, read_neighbors, reordered
from mpicomm.cluster.process import ranks_in_world
from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.session import Session

if TYPE_CHECKING:
    from typing_extensions import Self

    from mpicomm.api.communicator import CartCommunicator, Communicator, DistGraphCommunicator, GraphCommunicator

Made = TypeVar("Made")
"""The class of a communicator, which each caller of `Constructors._adopt` names."""


class Constructors(MPI.Intracomm):
    """mpi4py's calls that make communicators from this one. All of them are *collective* and blocking, except `Idup`.

    If a rank does not come within ``timeout_s``, they raise `CollectiveTimeoutError` with its number, on all ranks
    alike. This communicator stays usable.

    They return Communicators, with a topology if MPI gives them one. A duplicate keeps the topology, a part has none.
    With ``reorder=True`` a process may have another rank in a communicator with a topology. On GPUs of one node the new
    order gives neighbours the fastest links. Otherwise MPI decides on the order.
    """

    _session: Session
    _is_installed: bool
    _row: memoryview
    _classes: ClassVar[dict[int, type[MPI.Intracomm]]] = {}
    """The class of a communicator that is made from this one, by MPI's number of its topology."""

    def Dup(self, info: MPI.Info | None = None) -> Self:
        """Duplicate the communicator. The duplicate has its own memory."""
        return self._adopt_duplicate(self._after_barrier("Dup").Dup(info))

    def Dup_with_info(self, info: MPI.Info) -> Self:
        """Duplicate the communicator with the hints ``info``."""
        return self._adopt_duplicate(self._after_barrier("Dup_with_info").Dup_with_info(info))

    def Clone(self) -> Self:
        """Duplicate the communicator: mpi4py's other name for `Dup`."""
        return self._adopt_duplicate(self._after_barrier("Clone").Clone())

    def Idup(self, info: MPI.Info | None = None) -> tuple[Self, MPI.Request]:
        """Duplicate without blocking. The new communicator may be used when the request is complete."""
        comm, request = MPI.Intracomm(self).Idup(info)
        return self._adopt_duplicate(comm), request

    def Idup_with_info(self, info: MPI.Info) -> tuple[Self, MPI.Request]:
        """Duplicate with the hints ``info``, without blocking."""
        comm, request = MPI.Intracomm(self).Idup_with_info(info)
        return self._adopt_duplicate(comm), request

    def Create(self, group: MPI.Group) -> Communicator:
        """Make a communicator of the ranks of ``group``. The other ranks get COMM_NULL."""
        return self._adopt(self._after_barrier("Create").Create(group))

    def Create_group(self, group: MPI.Group, tag: int = 0) -> Communicator:
        """Make a communicator of the ranks of ``group``. Collective only over these ranks.

        If this communicator is not set up yet, the call waits in MPI without a limit. After a missing rank the ranks
        cannot make this call again.
        """
        ranks = self._ranks_of(group)
        plain = MPI.Intracomm(self)
        if self._session.await_some("Create_group", ranks):
            made = plain.Create_group(group, tag)
        else:
            # A step, because only the members make the call: its count would show other ranks behind.
            with page().step("Create_group", ranks_in_world(plain, ranks)):
                made = plain.Create_group(group, tag)
        return self._adopt(made, ranks)

    def Split(self, color: int = 0, key: int = 0) -> Communicator:
        """Make one communicator per color, with its ranks in the order of ``key``. Collective, blocking.

        A rank with the color ``MPI.UNDEFINED`` gets COMM_NULL.

            with comm.Split(color=comm.rank % 2, key=comm.rank) as part:
                part.Barrier()
        """
        return self._adopt(self._after_barrier("Split").Split(color, key))

    def Split_type(self, split_type: int, key: int = 0, info: MPI.Info = MPI.INFO_NULL) -> Communicator:
        """Make one communicator per part of the machine, e.g. ``MPI.COMM_TYPE_SHARED``."""
        return self._adopt(self._after_barrier("Split_type").Split_type(split_type, key, info))

    def Create_cart(
        self, dims: Sequence[int], periods: Sequence[bool] | bool | None = None, reorder: bool = False
    ) -> CartCommunicator:
        """Make a communicator of a Cartesian grid, a `CartCommunicator`. Collective, blocking.

        Ranks beyond the grid get COMM_NULL.

            with comm.Create_cart(MPI.Compute_dims(comm.size, 2), periods=[True, False]) as grid:
                before, after = grid.Shift(0, 1)
        """
        self._after_barrier("Create_cart")
        edges = partial(edges_of_grid, dims, periods, self.size)
        with reordered(self, self._session, "Create_cart", reorder, edges) as (plain, reorder):
            return self._adopt(plain.Create_cart(dims, periods, reorder))

    def Create_graph(self, index: Sequence[int], edges: Sequence[int], reorder: bool = False) -> GraphCommunicator:
        """Make a communicator of a graph that all ranks pass, a `GraphCommunicator`.

        Raises `InvalidUsageError` on every rank for lists that are no graph of its ranks. Collectives of neighbours
        raise it if two ranks do not name each other equally often.
        """
        found = read_graph(self._after_barrier("Create_graph"), index, edges)
        with reordered(self, self._session, "Create_graph", reorder, lambda: found) as (plain, reorder):
            return self._adopt(plain.Create_graph(index, edges, reorder))

    def Create_dist_graph_adjacent(
        self,
        sources: Sequence[int] | None,
        destinations: Sequence[int] | None,
        sourceweights: Sequence[int] | int | None = None,
        destweights: Sequence[int] | int | None = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> DistGraphCommunicator:
        """Make a communicator of a graph, a `DistGraphCommunicator`. Each rank passes its own neighbours.

        Raises `InvalidUsageError` on every rank if a neighbour is neither a rank nor MPI.PROC_NULL, or if two
        neighbours do not name each other.
        """
        plain = self._after_barrier("Create_dist_graph_adjacent")
        neighbors = read_neighbors(plain, sources, destinations, sourceweights, destweights)
        edges = partial(edges_of, neighbors)
        with reordered(self, self._session, "Create_dist_graph_adjacent", reorder, edges) as (plain, reorder):
            # The lists belong to a position in the graph. The rank that takes the position passes its lists on.
            return self._adopt(plain.Create_dist_graph_adjacent(*neighbors[plain.rank], info, reorder))

    def Create_dist_graph(
        self,
        sources: Sequence[int],
        degrees: Sequence[int],
        destinations: Sequence[int],
        weights: Sequence[int] | int | None = None,
        info: MPI.Info = MPI.INFO_NULL,
        reorder: bool = False,
    ) -> DistGraphCommunicator:
        """Make a communicator of a graph, a `DistGraphCommunicator`. Each rank passes any edges.

        Raises `InvalidUsageError` on every rank if one rank passes lists that are no edges between ranks.
        """
        edges = read_edges(self._after_barrier("Create_dist_graph"), sources, degrees, destinations, weights)
        with reordered(self, self._session, "Create_dist_graph", reorder, lambda: edges) as (plain, reorder):
            return self._adopt(plain.Create_dist_graph(sources, degrees, destinations, weights, info, reorder))

    def _after_barrier(self, operation: str) -> MPI.Intracomm:
        """Return MPI's communicator after a barrier with a deadline, because MPI waits for ranks without a limit."""
        begin_mpi_call(self._row, mpi_call_number(operation))
        self._session.await_all(operation)
        return MPI.Intracomm(self)

    def _ranks_of(self, group: MPI.Group) -> list[int]:
        """Return the ranks of ``group`` in this communicator. Raise for a group with which MPICH ends the program."""
        mine = self.Get_group()
        ranks = group.Translate_ranks(range(group.size), mine)
        mine.Free()
        wrong = ""
        if MPI.UNDEFINED in ranks:
            wrong = f"has {ranks.count(MPI.UNDEFINED)} processes that the communicator does not have"
        elif ranks and self.rank not in ranks:
            wrong = f"has the ranks {ranks}, and not rank {self.rank}, which makes the call"
        if wrong:
            raise RefusedByMpiError(
                f"Create_group: group {wrong}: make it by comm.Get_group().Incl(ranks), and call on these ranks only",
                MPI.ERR_GROUP,
            )
        return ranks

    def _adopt_duplicate(self, comm: MPI.Intracomm) -> Self:
        """Return a communicator of the same ranks as a Communicator like this one."""
        return self._adopt(comm, range(self.size), type(self))

    def _adopt(self, comm: MPI.Comm, ranks: Sequence[int] | None = None, cls: Any = None) -> Made:  # type: ignore[type-var]
        """Return ``comm``, which MPI made from this communicator, as a Communicator. Keep COMM_NULL.

        It sets itself up at its first use. ``ranks`` are its ranks in this communicator, if the caller knows them, and
        ``cls`` is its class, if that does not follow from its topology.
        """
        plain: Any = comm
        if comm == MPI.COMM_NULL:
            return plain  # type: ignore[no-any-return]
        if cls is None:
            topology = comm.Get_topology()
            keeps_class = topology == MPI.UNDEFINED and not isinstance(self, MPI.Topocomm)
            cls = type(self) if keeps_class else self._classes[topology]
        if ranks is None:
            group, parent_group = comm.Get_group(), self.Get_group()
            # MPICH's group of a grid may also hold ranks beyond the grid.
            ranks = group.Translate_ranks(range(comm.size), parent_group)
            group.Free()
            parent_group.Free()
        tracer = self._session.tracer
        child: Any = MPI.Intracomm.__new__(cls, comm)
        child._begin(Session(plain, self._session.placement.subset(ranks), tracer=tracer and tracer.child(ranks)))
        child._is_installed = self._is_installed
        return child  # type: ignore[no-any-return]
