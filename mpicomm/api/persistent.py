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
        **operands: Any,
    ) -> MPI.Prequest:
        """Prepare `Allreduce`; return its request."""
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
        """Prepare `Allgather`; return its request."""
        return self._collectives.prepare(
            rows.ALLGATHER, Arguments(sendbuf, recvbuf, wire=as_wire(wire_dtype)), info, stream, algorithm
        )

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Allgatherv`; return its request."""
        return self._collectives.prepare(rows.ALLGATHERV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoall`; return its request."""
        return self._collectives.prepare(rows.ALLTOALL, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallv`; return its request."""
        return self._collectives.prepare(rows.ALLTOALLV, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallw`; return its request."""
        return self._collectives.prepare(rows.ALLTOALLW, Arguments(sendbuf, recvbuf), info, stream, algorithm)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Bcast`; return its request."""
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
        """Prepare `Exscan`; return its request."""
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
        """Prepare `Gather`; return its request."""
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
        """Prepare `Gatherv`; return its request."""
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
    ) -> MPI.Prequest:
        """Prepare `Reduce`; return its request."""
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
        """Prepare `Reduce_scatter`; return its request."""
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
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter_block`; return its request."""
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
        """Prepare `Scan`; return its request."""
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
        """Prepare `Scatter`; return its request."""
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
        """Prepare `Scatterv`; return its request."""
        return self._collectives.prepare(rows.SCATTERV, Arguments(sendbuf, recvbuf, root=root), info, stream, algorithm)
