"""The nonblocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.collectives.call import Arguments
from mpicomm.collectives.dispatch import Collectives
from mpicomm.collectives.operations import (
    ALLGATHER,
    ALLGATHERV,
    ALLREDUCE,
    ALLTOALL,
    ALLTOALLV,
    BCAST,
    EXSCAN,
    GATHER,
    GATHERV,
    REDUCE,
    REDUCE_SCATTER,
    REDUCE_SCATTER_BLOCK,
    SCAN,
    SCATTER,
    SCATTERV,
)


class NonblockingCollectives(MPI.Intracomm):
    """mpi4py's nonblocking collectives on arrays of the host or of a GPU.

    As the blocking ones, with a request: MPI's own on host arrays; on device arrays one whose ``Wait`` blocks until the
    device is done, and which ``MPI.Request.Waitall`` and its kin take too. Work that is enqueued later on
    the same stream needs no wait. Host arrays of types that MPI lacks are done when the call returns.
    """

    _collectives: Collectives

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start a nonblocking Allgather."""
        return self._collectives.start(ALLGATHER, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start a nonblocking Allgatherv."""
        return self._collectives.start(ALLGATHERV, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Iallreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Allreduce."""
        return self._collectives.start(ALLREDUCE, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start a nonblocking Alltoall."""
        return self._collectives.start(ALLTOALL, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start a nonblocking Alltoallv."""
        return self._collectives.start(ALLTOALLV, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start a nonblocking Bcast."""
        return self._collectives.start(BCAST, Arguments(receive=buf, root=root), stream, algorithm)

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Exscan."""
        return self._collectives.start(EXSCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Gather."""
        return self._collectives.start(GATHER, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Gatherv."""
        return self._collectives.start(GATHERV, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Request:
        """Start a nonblocking Reduce."""
        return self._collectives.start(
            REDUCE, Arguments(send=sendbuf, receive=recvbuf, op=op, root=root), stream, algorithm
        )

    def Ireduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Request:
        """Start a nonblocking Reduce_scatter."""
        return self._collectives.start(
            REDUCE_SCATTER, Arguments(send=sendbuf, receive=recvbuf, counts=recvcounts, op=op), stream, algorithm
        )

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Reduce_scatter_block."""
        return self._collectives.start(
            REDUCE_SCATTER_BLOCK, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm
        )

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Scan."""
        return self._collectives.start(SCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Scatter."""
        return self._collectives.start(SCATTER, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start a nonblocking Scatterv."""
        return self._collectives.start(SCATTERV, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)
