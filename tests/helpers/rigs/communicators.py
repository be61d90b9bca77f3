"""Communicators on the device of a test, on hosts by name or with a topology, and the forms of their calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

import mpicomm
from mpicomm.cluster import placement as parts
from tests.helpers.jobs.pace import stretched


def communicator(
    device: str, comm: MPI.Intracomm = MPI.COMM_WORLD, *, timeout_s: float = 20.0, handle: str = "auto"
) -> mpicomm.Communicator:
    """Return a new Communicator on the device that the ``device`` fixture names. Collective."""
    return mpicomm.Communicator(comm, device="cpu" if device == "cpu" else "auto", handle=handle, timeout_s=timeout_s)


def patience_s(device: str) -> float:
    """Return a deadline for data that never comes. Data that comes is faster, also on GPUs and a busy machine."""
    return stretched(0.5 if device == "cpu" else 1.0)


@contextlib.contextmanager
def array_module(comm: mpicomm.Communicator) -> Iterator[Any]:
    """Give NumPy, or CuPy with the communicator's GPU as the current device."""
    if comm.device == "cpu":
        yield np
    else:
        import cupy

        with cupy.cuda.Device(comm.device):
            yield cupy


def to_host(array: Any) -> npt.NDArray[Any]:
    """Return a NumPy copy of a NumPy or CuPy array."""
    copy: npt.NDArray[Any] = array.get() if hasattr(array, "get") else np.array(array)
    return copy


def settle(comm: mpicomm.Communicator) -> None:
    """Let every rank come to the end of its work. Collective."""
    comm.check()
    comm.Barrier()


def node_ranks(array: mpicomm.SymmetricArray) -> list[int]:
    """Return the ranks whose parts this rank can access."""
    return [rank for rank, pointer in enumerate(to_host(array.pointers).tolist()) if pointer]


def ring_in_host(comm: mpicomm.Communicator) -> tuple[int, int]:
    """Return the ranks that follow and precede this one among the ranks of its host. Collective."""
    host = comm.describe().node
    ranks = [rank for rank, each in enumerate(comm.allgather(host)) if each == host]
    return ranks[(comm.local_rank + 1) % len(ranks)], ranks[comm.local_rank - 1]


def groups_of(comm: mpicomm.Communicator) -> tuple[tuple[int, ...], ...] | None:
    """Return the ranks of each group that reduces by itself, None if there is one group. Local."""
    groups = comm._session.placement.domains
    return groups if len(groups) > 1 else None


def require_memory_works(comm: mpicomm.Communicator) -> None:
    """Let every rank write into every part that it can access, and check its own part. Collective."""
    with array_module(comm), comm.zeros(comm.size, np.int64) as array:
        ranks = node_ranks(array)
        assert comm.rank in ranks
        for peer in ranks:
            array.peer(peer)[comm.rank] = 1000 + 10 * comm.rank + peer
        settle(comm)
        expected = [1000 + 10 * rank + comm.rank if rank in ranks else 0 for rank in range(comm.size)]
        assert to_host(array.local).tolist() == expected


def halves(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Even ranks and odd ranks, in order."""
    half = comm.Split(comm.rank % 2, comm.rank)
    assert isinstance(half, MPI.Intracomm)
    return half


FORMS = ("{}", "I{}", "{}_init")


def method_name(form: str, operation: str) -> str:
    return form.format(operation.lower() if form == "I{}" else operation)


def complete(request: MPI.Request | None, starts: int = 1) -> None:
    """Wait for a call in any form. A persistent request is started ``starts`` times and freed."""
    if isinstance(request, MPI.Prequest):
        for _ in range(starts):
            request.Start()
            request.Wait()
        request.Free()
    elif request is not None:
        request.Wait()


def awaited(started: tuple[Any, MPI.Request]) -> Any:
    """Return the communicator that a nonblocking call makes."""
    started[1].Wait()
    return started[0]


PLACEMENTS: dict[str, Callable[[int, int], int]] = {
    "in order": lambda rank, size: 2 * rank // size,
    "in turns": lambda rank, size: rank % 2,
    "uneven": lambda rank, size: min(rank, 1),
    "a pair first": lambda rank, size: max(rank - 1, 0),
    "one each": lambda rank, size: rank,
    "one host": lambda rank, size: 0,
}
"""The host of a rank, from its number and the number of ranks. GPUs of one host are groups of up to `MOST` ranks."""
MOST = 2


def groups_on(placement: str, size: int, device: str = "cpu") -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks, in the order of their first ranks."""
    if placement == "one host" and device != "cpu":
        return tuple(map(tuple, parts.split_evenly(range(size), MOST)))
    hosts: dict[int, list[int]] = {}
    for rank in range(size):
        hosts.setdefault(PLACEMENTS[placement](rank, size), []).append(rank)
    return tuple(map(tuple, hosts.values()))


@contextlib.contextmanager
def on_hosts(placement: str, device: str, *, timeout_s: float = 20.0) -> Iterator[mpicomm.Communicator]:
    """Give a Communicator of all ranks on these hosts. Collective."""
    host = PLACEMENTS[placement](MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    # NCCL takes ranks that share a GPU if they claim to be on different hosts. It reads the variable once.
    os.environ.setdefault("NCCL_HOSTID", f"rank{MPI.COMM_WORLD.rank}")
    few = mock.patch.object(parts, "MAX_RANKS", MOST) if placement == "one host" else contextlib.nullcontext()
    with few:
        with mock.patch.dict(os.environ, MPICOMM_HOSTID=f"host{host}"):
            comm = communicator(device, timeout_s=timeout_s)
        try:
            yield comm
        finally:
            comm.Free()


Array = npt.NDArray[Any]


def _edges(size: int) -> list[tuple[int, int]]:
    """Any edges, the same on all ranks: some occur several times, and some go from a rank to itself."""
    rng = np.random.default_rng(size)
    return [(int(a), int(b)) for a, b in rng.integers(0, size, (4 * size, 2))]


def _graph(comm: MPI.Intracomm) -> MPI.Topocomm:
    size = comm.size
    edges = [[(rank - 1) % size, rank, (rank + 1) % size] for rank in range(size)]
    return comm.Create_graph([3 * rank + 3 for rank in range(size)], [peer for each in edges for peer in each])


def _adjacent(comm: MPI.Intracomm) -> MPI.Topocomm:
    edges, me = _edges(comm.size), comm.rank
    return comm.Create_dist_graph_adjacent([a for a, b in edges if b == me], [b for a, b in edges if a == me])


def _anywhere(comm: MPI.Intracomm) -> MPI.Topocomm:
    """Each rank passes the edge from the next rank to its next rank."""
    size, me = comm.size, comm.rank
    return comm.Create_dist_graph([(me + 1) % size], [1], [(me + 2) % size])


def _star(comm: MPI.Intracomm) -> MPI.Topocomm:
    others = range(1, comm.size)
    return comm.Create_dist_graph_adjacent([0] if comm.rank else [], [] if comm.rank else others)


TOPOLOGIES: dict[str, Callable[[MPI.Intracomm], MPI.Topocomm]] = {
    "ring": lambda comm: comm.Create_cart([comm.size], [True]),
    "line": lambda comm: comm.Create_cart([comm.size], [False]),
    "torus": lambda comm: comm.Create_cart(MPI.Compute_dims(comm.size, 2), [True, True]),
    "cylinder": lambda comm: comm.Create_cart(MPI.Compute_dims(comm.size, 2), [False, True]),
    "thin torus": lambda comm: comm.Create_cart([1, comm.size], [True, True]),
    "graph": _graph,
    "adjacent": _adjacent,
    "anywhere": _anywhere,
    "star": _star,
    "no edges": lambda comm: comm.Create_dist_graph_adjacent([], []),
}

CALLS = ("allgather", "allgatherv", "alltoall", "alltoallv", "alltoallw", "columns")
"""The collectives of neighbours, and one that sends and receives columns of matrices."""
_ROOM = 8
_EQUAL = 5


class NeighborCall:
    """This rank's part of a call: the layout of its buffers, and its arguments for arrays of this layout."""

    def __init__(self, name: str, comm: MPI.Topocomm) -> None:
        self.name = "alltoallw" if name == "columns" else name
        self._columns = name == "columns"
        self._rank = comm.rank
        self._sources, self._destinations = comm.inoutedges
        self._sends_one = name.startswith("allgather")
        self._column = MPI.FLOAT.Create_vector(_ROOM, 1, 1)
        if self._columns:
            self._column.Free()
            most = max(1, len(self._sources), len(self._destinations))
            self._column = MPI.FLOAT.Create_vector(_ROOM, 1, most)
            self._width = most
        self._column.Commit()

    def free(self) -> None:
        """Free the datatype of the call."""
        self._column.Free()

    def sent(self, turn: int) -> Array:
        """New content for a send buffer."""
        rng = np.random.default_rng([self._rank, turn])
        return rng.integers(0, 1000, self._length(self._destinations, one=self._sends_one)).astype(np.float32)

    def nothing(self) -> Array:
        """A receive buffer before the call."""
        return np.full(self._length(self._sources), -1, np.float32)

    def arguments(self, send: Any, receive: Any) -> tuple[Any, Any]:
        """The arguments of the method."""
        if self.name == "allgather":
            return send, receive
        if self.name == "alltoall":
            return [send, _EQUAL, MPI.FLOAT], [receive, MPI.FLOAT]
        if self.name == "allgatherv":
            return [send, self._rank % 4], self._vector(receive, [rank % 4 for rank in self._sources])
        if self._columns:
            return self._of_columns(send, self._destinations), self._of_columns(receive, self._sources)
        sends = [self._count(self._rank, peer) for peer in self._destinations]
        receives = [self._count(peer, self._rank) for peer in self._sources]
        return self._vector(send, sends), self._vector(receive, receives)

    def _length(self, peers: list[int], *, one: bool = False) -> int:
        if self._columns:
            return self._width * _ROOM
        return (_EQUAL if self.name in ("allgather", "alltoall") else _ROOM) * (1 if one else len(peers))

    def _count(self, sender: int, receiver: int) -> int:
        # Beyond the edge of a grid there are counts, too.
        return 3 if MPI.PROC_NULL in (sender, receiver) else (3 * sender + 5 * receiver) % 7

    def _vector(self, array: Any, counts: list[int]) -> list[Any]:
        places = [_ROOM * number for number in reversed(range(len(counts)))]
        if self.name == "alltoallw":
            return [array, counts, [4 * place for place in places], [MPI.FLOAT] * len(counts)]
        return [array, counts, places, MPI.FLOAT]

    def _of_columns(self, array: Any, peers: list[int]) -> list[Any]:
        return [array, [1] * len(peers), [4 * number for number in range(len(peers))], [self._column] * len(peers)]


def fails_in_open_mpi(comm: MPI.Topocomm, name: str) -> bool:
    """Return whether Open MPI 5.0.11 waits for ever in a call, or raises. Collective.

    It does so if a rank receives from no neighbour, or sends to none.
    """
    alone = comm.allreduce(not all(comm.inoutedges), MPI.LOR)
    return "Open MPI" in MPI.Get_library_version() and alone and name in ("allgather", "alltoall")


def result_of_mpi(comm: MPI.Topocomm, call: NeighborCall, turn: int) -> Array:
    """This rank's receive buffer after MPI's own blocking call on host arrays. Collective.

    Other calls of Open MPI bring the two blocks of a rank on both sides of a grid the other way round.
    """
    received = call.nothing()
    getattr(MPI.Topocomm, f"Neighbor_{call.name}")(comm, *call.arguments(call.sent(turn), received))
    return received
