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
        """Receive a block from each neighbour, and send the same block to each.

        ``sendbuf`` has n elements, and ``recvbuf`` n for each neighbour that sends, in MPI's order of neighbours.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_allgather(x, y)
        """
        return self._collectives.run(rows.NEIGHBOR_ALLGATHER, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send the same block to each. Blocks differ in length.

        ``recvbuf`` is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour
        that sends.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full(3, grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_allgatherv(x, [y, [3, 3]])
        """
        return self._collectives.run(rows.NEIGHBOR_ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each.

        Both buffers have n elements for each neighbour, in MPI's order of neighbours.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_alltoall(x, y)
        """
        return self._collectives.run(rows.NEIGHBOR_ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each. Blocks differ in length.

        A buffer is ``[array, counts]`` or ``[array, (counts, displacements)]``, with an entry for each neighbour, in
        elements.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), grid.rank), cp.empty((2, 3), int)
                grid.Neighbor_alltoallv([x, [3, 3]], [y, [3, 3]])
        """
        return self._collectives.run(rows.NEIGHBOR_ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_alltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Receive a block from each neighbour, and send another block to each. Blocks differ in datatype.

        A buffer is ``[array, counts, displacements, types]``, with an entry for each neighbour. Displacements are in
        bytes.

        Collective. On host arrays the call blocks. On device arrays it is enqueued on ``stream``, by default the
        current stream of their library. ``algorithm`` is "auto", "one_shot" or "mpi", the same on all ranks. Raises
        `InvalidUsageError` for wrong arguments, `PeerError` if ranks call different things, and
        `CollectiveTimeoutError` if one does not come; on device arrays `check` or the next call raises the last two.

            with comm.Create_cart([comm.size], periods=[True]) as grid:
                x, y = cp.full((2, 3), float(grid.rank)), cp.empty((2, 3))
                blocks = [1, 1], [0, x.nbytes // 2], [MPI.DOUBLE.Create_contiguous(3).Commit()] * 2
                grid.Neighbor_alltoallw([x, *blocks], [y, *blocks])
        """
        return self._collectives.run(rows.NEIGHBOR_ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_allgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgather` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.NEIGHBOR_ALLGATHER, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_allgatherv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_allgatherv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.NEIGHBOR_ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoall(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoall` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoallv(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Ineighbor_alltoallw(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Neighbor_alltoallw` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.NEIGHBOR_ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Neighbor_allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgather` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLGATHER, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_allgatherv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLGATHERV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoall` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALL, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALLV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Neighbor_alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Neighbor_alltoallw` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.NEIGHBOR_ALLTOALLW, Arguments(sendbuf, recvbuf), info, stream, algorithm)
