"""The nonblocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import CALL, CALLS_BY_MPI
from mpicomm.activity.page import begin_by_mpi, by_mpi
from mpicomm.collectives import operations as rows
from mpicomm.collectives.host.fast_path import PlainCheck
from mpicomm.collectives.wire import as_wire
from mpicomm.epilogues import as_epilogue
from mpicomm.mpi.request_lists import holding
from mpicomm.ways.dispatch import Dispatcher
from mpicomm.ways.reader import REFUSALS

# MPI's method, and the number by which the doctor names the call: see blocking.py.
_iallreduce = MPI.Intracomm.Iallreduce
_ALLREDUCE = by_mpi("Allreduce")


class NonblockingCollectives(MPI.Intracomm):
    """mpi4py's nonblocking collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. They return a request:

    - On host arrays it is MPI's, or on a communicator of GPUs one that first waits for the ranks to say where their
      arrays lie. The start waits for no rank after the first collective of a communicator. If MPI lacks the type or
      the operation, or with ``algorithm=`` other than "auto" and "mpi", MPI moves the data of all ranks, and the
      request reduces it in rank order. A rank that has a result needs memory for the data of all ranks for this.
    - On device arrays the call enqueues the collective. ``Wait`` blocks until the device has finished it. The request
      also works in ``MPI.Request.Waitall`` and the other calls on lists. Later work on the same stream needs no wait,
      except if MPI carries out the call: then the result is there after ``Wait``.
    """

    _collectives: Dispatcher
    _plain: dict[str, PlainCheck]
    _row: memoryview

    def Iallreduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        epilogue: Any = None,
        wire_dtype: Any = None,
        order: str = "auto",
        **operands: Any,
    ) -> MPI.Request:
        """Start `Allreduce` with its arguments; return the request. Keep its buffers until ``Wait``.

        Later work on ``stream`` finds the result without ``Wait``.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Iallreduce(x, y)
            request.Wait()
        """
        if order != "auto":
            op = self._collectives.in_order(rows.ALLREDUCE, op, order)
        if epilogue is not None or operands or wire_dtype is not None:
            finish, wire = as_epilogue(epilogue, operands), as_wire(wire_dtype)
            return self._collectives.start(
                rows.ALLREDUCE, stream, algorithm, sendbuf, recvbuf, op, epilogue=finish, wire=wire
            )
        if stream is None and algorithm == "auto" and self._plain["Iallreduce"](sendbuf, recvbuf, op):
            row = self._row
            row[CALLS_BY_MPI] += 1
            row[CALL] = _ALLREDUCE
            try:
                return holding(_iallreduce(self, sendbuf, recvbuf, op), (sendbuf, recvbuf, op))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.ALLREDUCE, sendbuf, recvbuf, op)
        return self._collectives.start(rows.ALLREDUCE, stream, algorithm, sendbuf, recvbuf, op)

    # scripts/write_methods.py writes all that follows, from the table of operations.

    def Iallgather(
        self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto", wire_dtype: Any = None
    ) -> MPI.Request:
        """Start `Allgather` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if (
            stream is None
            and algorithm == "auto"
            and wire_dtype is None
            and self._plain["Iallgather"](sendbuf, recvbuf)
        ):
            begin_by_mpi(self._row, _ALLGATHER)
            try:
                return _iallgather(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.ALLGATHER, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLGATHER, stream, algorithm, sendbuf, recvbuf, wire=as_wire(wire_dtype))

    def Iallgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Allgatherv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Iallgatherv"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLGATHERV)
            try:
                return holding(_iallgatherv(self, sendbuf, recvbuf), (sendbuf, recvbuf))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.ALLGATHERV, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Ialltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoall` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Ialltoall"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLTOALL)
            try:
                return _ialltoall(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.ALLTOALL, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Ialltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Ialltoallv"](sendbuf, recvbuf):
            begin_by_mpi(self._row, _ALLTOALLV)
            try:
                return _ialltoallv(self, sendbuf, recvbuf)
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.ALLTOALLV, sendbuf, recvbuf)
        return self._collectives.start(rows.ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Ialltoallw(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Alltoallw` with its arguments; return the request. Keep its buffers until ``Wait``."""
        return self._collectives.start(rows.ALLTOALLW, stream, algorithm, sendbuf, recvbuf)

    def Ibcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> MPI.Request:
        """Start `Bcast` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Ibcast"](None, buf):
            begin_by_mpi(self._row, _BCAST)
            try:
                return _ibcast(self, buf, root)
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.BCAST, None, buf, root=root)
        return self._collectives.start(rows.BCAST, stream, algorithm, None, buf, root=root)

    def Iexscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Exscan` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Iexscan"](sendbuf, recvbuf, op):
            begin_by_mpi(self._row, _EXSCAN)
            try:
                return holding(_iexscan(self, sendbuf, recvbuf, op), (sendbuf, recvbuf, op))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.EXSCAN, sendbuf, recvbuf, op)
        return self._collectives.start(rows.EXSCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Igather(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gather` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Igather"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _GATHER)
            try:
                return holding(_igather(self, sendbuf, recvbuf, root), (sendbuf, recvbuf, root))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.GATHER, sendbuf, recvbuf, root=root)
        return self._collectives.start(rows.GATHER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Igatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Gatherv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Igatherv"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _GATHERV)
            try:
                return holding(_igatherv(self, sendbuf, recvbuf, root), (sendbuf, recvbuf, root))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.GATHERV, sendbuf, recvbuf, root=root)
        return self._collectives.start(rows.GATHERV, stream, algorithm, sendbuf, recvbuf, root=root)

    def Ireduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        order: str = "auto",
    ) -> MPI.Request:
        """Start `Reduce` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE, op, order)
        if stream is None and algorithm == "auto" and self._plain["Ireduce"](sendbuf, recvbuf, op, root):
            begin_by_mpi(self._row, _REDUCE)
            try:
                return holding(_ireduce(self, sendbuf, recvbuf, op, root), (sendbuf, recvbuf, op, root))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.REDUCE, sendbuf, recvbuf, op, root)
        return self._collectives.start(rows.REDUCE, stream, algorithm, sendbuf, recvbuf, op, root)

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
        """Start `Reduce_scatter` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if (
            stream is None
            and algorithm == "auto"
            and recvcounts is not None
            and self._plain["Ireduce_scatter"](sendbuf, recvbuf, op)
        ):
            begin_by_mpi(self._row, _REDUCE_SCATTER)
            try:
                return holding(
                    _ireduce_scatter(self, sendbuf, recvbuf, recvcounts, op), (sendbuf, recvbuf, recvcounts, op)
                )
            except REFUSALS as error:
                return self._collectives.start_again(
                    error, rows.REDUCE_SCATTER, sendbuf, recvbuf, op, counts=recvcounts
                )
        return self._collectives.start(rows.REDUCE_SCATTER, stream, algorithm, sendbuf, recvbuf, op, counts=recvcounts)

    def Ireduce_scatter_block(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
        order: str = "auto",
    ) -> MPI.Request:
        """Start `Reduce_scatter_block` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE_SCATTER_BLOCK, op, order)
        if (
            stream is None
            and algorithm == "auto"
            and wire_dtype is None
            and self._plain["Ireduce_scatter_block"](sendbuf, recvbuf, op)
        ):
            begin_by_mpi(self._row, _REDUCE_SCATTER_BLOCK)
            try:
                return holding(_ireduce_scatter_block(self, sendbuf, recvbuf, op), (sendbuf, recvbuf, op))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.REDUCE_SCATTER_BLOCK, sendbuf, recvbuf, op)
        return self._collectives.start(
            rows.REDUCE_SCATTER_BLOCK, stream, algorithm, sendbuf, recvbuf, op, wire=as_wire(wire_dtype)
        )

    def Iscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scan` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Iscan"](sendbuf, recvbuf, op):
            begin_by_mpi(self._row, _SCAN)
            try:
                return holding(_iscan(self, sendbuf, recvbuf, op), (sendbuf, recvbuf, op))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.SCAN, sendbuf, recvbuf, op)
        return self._collectives.start(rows.SCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Iscatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatter` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Iscatter"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _SCATTER)
            try:
                return holding(_iscatter(self, sendbuf, recvbuf, root), (sendbuf, recvbuf, root))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.SCATTER, sendbuf, recvbuf, root=root)
        return self._collectives.start(rows.SCATTER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Iscatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Request:
        """Start `Scatterv` with its arguments; return the request. Keep its buffers until ``Wait``."""
        if stream is None and algorithm == "auto" and self._plain["Iscatterv"](sendbuf, recvbuf, None, root):
            begin_by_mpi(self._row, _SCATTERV)
            try:
                return holding(_iscatterv(self, sendbuf, recvbuf, root), (sendbuf, recvbuf, root))
            except REFUSALS as error:
                return self._collectives.start_again(error, rows.SCATTERV, sendbuf, recvbuf, root=root)
        return self._collectives.start(rows.SCATTERV, stream, algorithm, sendbuf, recvbuf, root=root)


_iallgather, _ALLGATHER = MPI.Intracomm.Iallgather, by_mpi("Allgather")
_iallgatherv, _ALLGATHERV = MPI.Intracomm.Iallgatherv, by_mpi("Allgatherv")
_ialltoall, _ALLTOALL = MPI.Intracomm.Ialltoall, by_mpi("Alltoall")
_ialltoallv, _ALLTOALLV = MPI.Intracomm.Ialltoallv, by_mpi("Alltoallv")
_ibcast, _BCAST = MPI.Intracomm.Ibcast, by_mpi("Bcast")
_iexscan, _EXSCAN = MPI.Intracomm.Iexscan, by_mpi("Exscan")
_igather, _GATHER = MPI.Intracomm.Igather, by_mpi("Gather")
_igatherv, _GATHERV = MPI.Intracomm.Igatherv, by_mpi("Gatherv")
_ireduce, _REDUCE = MPI.Intracomm.Ireduce, by_mpi("Reduce")
_ireduce_scatter, _REDUCE_SCATTER = MPI.Intracomm.Ireduce_scatter, by_mpi("Reduce_scatter")
_ireduce_scatter_block, _REDUCE_SCATTER_BLOCK = MPI.Intracomm.Ireduce_scatter_block, by_mpi("Reduce_scatter_block")
_iscan, _SCAN = MPI.Intracomm.Iscan, by_mpi("Scan")
_iscatter, _SCATTER = MPI.Intracomm.Iscatter, by_mpi("Scatter")
_iscatterv, _SCATTERV = MPI.Intracomm.Iscatterv, by_mpi("Scatterv")
