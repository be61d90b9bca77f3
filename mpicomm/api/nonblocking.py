"""The nonblocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.activity.page import begin_mpis
from mpicomm.collectives import operations as rows
from mpicomm.collectives.call import Arguments
from mpicomm.collectives.host.fast_path import Judge
from mpicomm.collectives.operations import Operation
from mpicomm.epilogues import as_epilogue
from mpicomm.mpi.requests import holding
from mpicomm.ways.dispatch import Dispatcher
from mpicomm.ways.reader import REFUSALS


def begin(comm: Any, row: Operation, *given: Any) -> MPI.Request:
    """Begin, with mpi4py's arguments, a call that MPI certainly carries out. Local."""
    begin_mpis(comm._row, row.number)
    try:
        return holding(row.begin(comm, *given), given)  # MPI uses the buffers until the request is complete
    except REFUSALS as error:
        names = {"buf": "receive", "sendbuf": "send", "recvbuf": "receive", "recvcounts": "counts"}
        named = {names.get(name, name): value for name, value in zip(row.arguments, given, strict=True)}
        raise comm._collectives.refused(error, row, **{"send": None, **named}) from error


class NonblockingCollectives(MPI.Intracomm):
    """mpi4py's nonblocking collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. They return a request:

    - On host arrays it is MPI's. If MPI lacks the type or the operation, or with ``algorithm=`` other than "auto" and
      "mpi", the call blocks and returns a complete request.
    - On device arrays the call enqueues the collective. ``Wait`` blocks until the device has finished it. The request
      also works in ``MPI.Request.Waitall`` and the other calls on lists. Later work on the same stream needs no wait.
    """

    _collectives: Dispatcher
    _plain: dict[str, Judge]

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
        finish = as_epilogue(epilogue, operands) if epilogue is not None or operands else None
        if finish is stream is None and algorithm == "auto" and self._plain["Iallreduce"](sendbuf, recvbuf, op):
            return begin(self, rows.ALLREDUCE, sendbuf, recvbuf, op)
        arguments = Arguments(sendbuf, recvbuf, op, epilogue=finish)
        return self._collectives.start(rows.ALLREDUCE, arguments, stream, algorithm)

    # scripts/write_methods.py writes all that follows, from the table of operations.

    def Iallgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgather`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iallgather"](sendbuf, recvbuf):
            return begin(self, rows.ALLGATHER, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLGATHER, Arguments(sendbuf, recvbuf), stream, algorithm)

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgatherv`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iallgatherv"](sendbuf, recvbuf):
            return begin(self, rows.ALLGATHERV, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLGATHERV, Arguments(sendbuf, recvbuf), stream, algorithm)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoall`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Ialltoall"](sendbuf, recvbuf):
            return begin(self, rows.ALLTOALL, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLTOALL, Arguments(sendbuf, recvbuf), stream, algorithm)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallv`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Ialltoallv"](sendbuf, recvbuf):
            return begin(self, rows.ALLTOALLV, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLTOALLV, Arguments(sendbuf, recvbuf), stream, algorithm)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallw`; return its request."""
        return self._collectives.start(rows.ALLTOALLW, Arguments(sendbuf, recvbuf), stream, algorithm)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Bcast`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Ibcast"](None, buf):
            return begin(self, rows.BCAST, buf, root)
        return self._collectives.start(rows.BCAST, Arguments(None, buf, root=root), stream, algorithm)

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Exscan`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iexscan"](sendbuf, recvbuf, op):
            return begin(self, rows.EXSCAN, sendbuf, recvbuf, op)
        return self._collectives.start(rows.EXSCAN, Arguments(sendbuf, recvbuf, op), stream, algorithm)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gather`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Igather"](sendbuf, recvbuf):
            return begin(self, rows.GATHER, sendbuf, recvbuf, root)
        return self._collectives.start(rows.GATHER, Arguments(sendbuf, recvbuf, root=root), stream, algorithm)

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gatherv`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Igatherv"](sendbuf, recvbuf):
            return begin(self, rows.GATHERV, sendbuf, recvbuf, root)
        return self._collectives.start(rows.GATHERV, Arguments(sendbuf, recvbuf, root=root), stream, algorithm)

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
        if stream is None and algorithm == "auto" and self._plain["Ireduce"](sendbuf, recvbuf, op):
            return begin(self, rows.REDUCE, sendbuf, recvbuf, op, root)
        return self._collectives.start(rows.REDUCE, Arguments(sendbuf, recvbuf, op, root), stream, algorithm)

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
        if (
            stream is None
            and algorithm == "auto"
            and recvcounts is not None
            and self._plain["Ireduce_scatter"](sendbuf, recvbuf, op)
        ):
            return begin(self, rows.REDUCE_SCATTER, sendbuf, recvbuf, recvcounts, op)
        return self._collectives.start(
            rows.REDUCE_SCATTER, Arguments(sendbuf, recvbuf, op, counts=recvcounts), stream, algorithm
        )

    def Ireduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Reduce_scatter_block`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Ireduce_scatter_block"](sendbuf, recvbuf, op):
            return begin(self, rows.REDUCE_SCATTER_BLOCK, sendbuf, recvbuf, op)
        return self._collectives.start(rows.REDUCE_SCATTER_BLOCK, Arguments(sendbuf, recvbuf, op), stream, algorithm)

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scan`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iscan"](sendbuf, recvbuf, op):
            return begin(self, rows.SCAN, sendbuf, recvbuf, op)
        return self._collectives.start(rows.SCAN, Arguments(sendbuf, recvbuf, op), stream, algorithm)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatter`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iscatter"](sendbuf, recvbuf):
            return begin(self, rows.SCATTER, sendbuf, recvbuf, root)
        return self._collectives.start(rows.SCATTER, Arguments(sendbuf, recvbuf, root=root), stream, algorithm)

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatterv`; return its request."""
        if stream is None and algorithm == "auto" and self._plain["Iscatterv"](sendbuf, recvbuf):
            return begin(self, rows.SCATTERV, sendbuf, recvbuf, root)
        return self._collectives.start(rows.SCATTERV, Arguments(sendbuf, recvbuf, root=root), stream, algorithm)
