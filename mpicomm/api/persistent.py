"""The persistent collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.collectives import operations as rows
from mpicomm.collectives.call import Arguments
from mpicomm.collectives.wire import as_wire
from mpicomm.epilogues import as_epilogue
from mpicomm.ways.dispatch import Dispatcher


class PersistentCollectives(MPI.Intracomm):
    """mpi4py's persistent collectives, on host arrays and on device arrays. All of them are *collective*.

    They have the arguments, algorithms and errors of the blocking calls. On host arrays the request is MPI's, which
    gets ``info``. If MPI lacks the type or the operation, ``Start`` begins the nonblocking call. On device arrays
    ``Start`` enqueues the collective, and ``Wait`` blocks until the device has finished it. ``Free`` releases the
    request.
    """

    _collectives: Dispatcher

    def Allreduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        epilogue: Any = None,
        wire_dtype: Any = None,
        order: str = "auto",
        **operands: Any,
    ) -> MPI.Prequest:
        """Prepare `Allreduce` with its arguments; return the request, for ``Start`` and ``Wait``.

        ``Free`` of the request releases it.

            x, y = cp.ones(8), cp.empty(8)
            request = comm.Allreduce_init(x, y)
            for _ in range(3):
                request.Start()
                request.Wait()
            request.Free()
        """
        if order != "auto":
            op = self._collectives.in_order(rows.ALLREDUCE, op, order)
        finish = as_epilogue(epilogue, operands)
        arguments = Arguments(sendbuf, recvbuf, op, epilogue=finish, wire=as_wire(wire_dtype))
        return self._collectives.prepare(rows.ALLREDUCE, arguments, info, stream, algorithm)

    # scripts/write_methods.py writes all that follows, from the table of operations.

    def Allgather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
    ) -> MPI.Prequest:
        """Prepare `Allgather` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(
            rows.ALLGATHER, Arguments(sendbuf, recvbuf, wire=as_wire(wire_dtype)), info, stream, algorithm
        )

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Allgatherv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.ALLGATHERV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoall` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.ALLTOALL, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.ALLTOALLV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallw` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.ALLTOALLW, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Bcast` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.BCAST, Arguments(None, buf, root=root), info, stream, algorithm)

    def Exscan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Exscan` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.EXSCAN, Arguments(sendbuf, recvbuf, op), info, stream, algorithm)

    def Gather_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Gather` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.GATHER, Arguments(sendbuf, recvbuf, root=root), info, stream, algorithm)

    def Gatherv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Gatherv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.GATHERV, Arguments(sendbuf, recvbuf, root=root), info, stream, algorithm)

    def Reduce_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        order: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce` with its arguments; return the request, for ``Start`` and ``Wait``."""
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE, op, order)
        return self._collectives.prepare(rows.REDUCE, Arguments(sendbuf, recvbuf, op, root), info, stream, algorithm)

    def Reduce_scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(
            rows.REDUCE_SCATTER, Arguments(sendbuf, recvbuf, op, counts=recvcounts), info, stream, algorithm
        )

    def Reduce_scatter_block_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
        wire_dtype: Any = None,
        order: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter_block` with its arguments; return the request, for ``Start`` and ``Wait``."""
        if order != "auto":
            op = self._collectives.in_order(rows.REDUCE_SCATTER_BLOCK, op, order)
        return self._collectives.prepare(
            rows.REDUCE_SCATTER_BLOCK,
            Arguments(sendbuf, recvbuf, op, wire=as_wire(wire_dtype)),
            info,
            stream,
            algorithm,
        )

    def Scan_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scan` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.SCAN, Arguments(sendbuf, recvbuf, op), info, stream, algorithm)

    def Scatter_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scatter` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.SCATTER, Arguments(sendbuf, recvbuf, root=root), info, stream, algorithm)

    def Scatterv_init(
        self,
        sendbuf: Any,
        recvbuf: Any,
        root: int = 0,
        info: MPI.Info = MPI.INFO_NULL,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> MPI.Prequest:
        """Prepare `Scatterv` with its arguments; return the request, for ``Start`` and ``Wait``."""
        return self._collectives.prepare(rows.SCATTERV, Arguments(sendbuf, recvbuf, root=root), info, stream, algorithm)
