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
    ALLTOALLW,
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
from mpicomm.epilogues import as_epilogue


class NonblockingCollectives(MPI.Intracomm):
    """mpi4py's nonblocking collectives, on host arrays and on device arrays. All of them are *collective*.

    Arguments, algorithms and errors are those of the blocking calls. The calls return a request:

    - On host arrays it is MPI's. If MPI lacks the type or the operation, or with ``algorithm=`` other than "auto" and
      "mpi", the call blocks and returns a request that is complete.
    - On device arrays the call enqueues the collective. ``Wait`` blocks until the device has finished it. The request
      also works in ``MPI.Request.Waitall`` and its kin. Work that is enqueued on the same stream later needs no wait.
    """

    _collectives: Collectives

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgather`; return its request."""
        return self._collectives.start(ALLGATHER, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgatherv`; return its request."""
        return self._collectives.start(ALLGATHERV, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        epilogue: Any = None,
        **operands: Any,
    ) -> MPI.Request:
        """Start `Allreduce`; return its request."""
        finish = as_epilogue(epilogue, operands)
        arguments = Arguments(send=sendbuf, receive=recvbuf, op=op, epilogue=finish)
        return self._collectives.start(ALLREDUCE, arguments, stream, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoall`; return its request."""
        return self._collectives.start(ALLTOALL, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallv`; return its request."""
        return self._collectives.start(ALLTOALLV, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallw`; return its request."""
        return self._collectives.start(ALLTOALLW, Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Bcast`; return its request."""
        return self._collectives.start(BCAST, Arguments(receive=buf, root=root), stream, algorithm)

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Exscan`; return its request."""
        return self._collectives.start(EXSCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gather`; return its request."""
        return self._collectives.start(GATHER, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gatherv`; return its request."""
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
        """Start `Reduce`; return its request."""
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
        """Start `Reduce_scatter`; return its request."""
        return self._collectives.start(
            REDUCE_SCATTER, Arguments(send=sendbuf, receive=recvbuf, counts=recvcounts, op=op), stream, algorithm
        )

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Reduce_scatter_block`; return its request."""
        return self._collectives.start(
            REDUCE_SCATTER_BLOCK, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm
        )

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scan`; return its request."""
        return self._collectives.start(SCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatter`; return its request."""
        return self._collectives.start(SCATTER, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatterv`; return its request."""
        return self._collectives.start(SCATTERV, Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)
