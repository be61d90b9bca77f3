"""The collectives of neighbours of a Communicator with a topology: blocking, nonblocking and persistent."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from mpicomm.collectives import operations as rows
from mpicomm.collectives.call import Arguments
from mpicomm.ways.dispatch import Dispatcher


class NeighborCollectives(MPI.Topocomm):
    """mpi4py's collectives of neighbours, on host arrays and on device arrays. All of them are *collective*.

    **Blocks.** The send buffer has a block for each rank to which this rank sends. The receive buffer has a block for
    each rank from which this rank receives. The blocks are in the order in which MPI names the neighbours. In the two
    gathering calls all neighbours get the same block. A rank may be its own neighbour and may occur several times. The
    block of ``MPI.PROC_NULL``, beyond the edge of a grid, stays as it is. What leaves a rank of a grid in one direction
    arrives from the other, also if both neighbours are one rank, in every form and with every MPI. No call is in place.

    **Order.** MPI carries out calls on host arrays. A call on device arrays is stream-ordered, and one exchange of
    kernels serves all neighbours of the peer domain, also in a CUDA graph. With ``algorithm="mpi"`` MPI carries it out
    on pinned host copies, and it blocks, also in the nonblocking form. ``Start`` of a persistent request on device
    arrays enqueues the call.

    A rank without neighbours also calls. It passes empty buffers in the memory that the other ranks use, or buffers
    that lie nowhere: see **Memory** of `BlockingCollectives`.

    **Errors.** Bad arguments raise `InvalidUsageError` (a ValueError) or TypeError, on the ranks that pass them. If two
    neighbours have device arrays with different numbers of bytes for each other, all ranks raise `PeerError`. They also
    raise it if ranks call different things. If a rank does not come in time, the ranks that come raise
    `CollectiveTimeoutError`. On device arrays the next call or ``check()`` raises these two errors. Waits inside MPI
    have no limit.
    """

    _collectives: Dispatcher

    # scripts/write_methods.py writes all that follows, from the table of operations.

    def Neighbor_allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send the same block to each."""
        return self._collectives.run(rows.NEIGHBOR_ALLGATHER, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Neighbor_allgather, with blocks of any counts and displacements in ``recvbuf``."""
        return self._collectives.run(rows.NEIGHBOR_ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each."""
        return self._collectives.run(rows.NEIGHBOR_ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Neighbor_alltoall, with blocks of any counts and displacements."""
        return self._collectives.run(rows.NEIGHBOR_ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Neighbor_alltoallv, with a datatype for each neighbour. Displacements are in bytes."""
        return self._collectives.run(rows.NEIGHBOR_ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgather`; return its request."""
        return self._collectives.start(rows.NEIGHBOR_ALLGATHER, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_allgatherv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgatherv`; return its request."""
        return self._collectives.start(rows.NEIGHBOR_ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoall(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoall`; return its request."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoallv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallv`; return its request."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoallw(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallw`; return its request."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgather`; return its request."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLGATHER, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgatherv`; return its request."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLGATHERV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoall`; return its request."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALL, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallv`; return its request."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALLV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallw`; return its request."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALLW, Arguments(sendbuf, recvbuf), info, stream, algorithm)
