"""The persistent collectives of a Communicator."""

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


class PersistentCollectives(MPI.Intracomm):
    """mpi4py's persistent collectives, on host arrays and on device arrays. All of them are *collective*.

    Arguments, algorithms and errors are those of the blocking calls. On host arrays the request is MPI's, which gets
    ``info``. If MPI lacks the type or the operation, ``Start`` blocks until the collective is done. On device arrays
    ``Start`` enqueues the collective, ``Wait`` blocks until the device has finished it, and ``Free`` gives the request
    up.
    """

    _collectives: Collectives

    def Allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Allgather`; return its request."""
        return self._collectives.prepare(ALLGATHER, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Allgatherv`; return its request."""
        return self._collectives.prepare(ALLGATHERV, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

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
        **operands: Any,
    ) -> MPI.Prequest:
        """Prepare `Allreduce`; return its request."""
        finish = as_epilogue(epilogue, operands)
        arguments = Arguments(send=sendbuf, receive=recvbuf, op=op, epilogue=finish)
        return self._collectives.prepare(ALLREDUCE, arguments, info, stream, algorithm)

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoall`; return its request."""
        return self._collectives.prepare(ALLTOALL, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallv`; return its request."""
        return self._collectives.prepare(ALLTOALLV, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Alltoallw_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Alltoallw`; return its request."""
        return self._collectives.prepare(ALLTOALLW, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare `Bcast`; return its request."""
        return self._collectives.prepare(BCAST, Arguments(receive=buf, root=root), info, stream, algorithm)

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
        return self._collectives.prepare(
            EXSCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), info, stream, algorithm
        )

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
        return self._collectives.prepare(
            GATHER, Arguments(send=sendbuf, receive=recvbuf, root=root), info, stream, algorithm
        )

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
        return self._collectives.prepare(
            GATHERV, Arguments(send=sendbuf, receive=recvbuf, root=root), info, stream, algorithm
        )

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
        return self._collectives.prepare(
            REDUCE, Arguments(send=sendbuf, receive=recvbuf, op=op, root=root), info, stream, algorithm
        )

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
        """Prepare `Reduce_scatter`; on host arrays either all ranks are in place or none."""
        return self._collectives.prepare(
            REDUCE_SCATTER,
            Arguments(send=sendbuf, receive=recvbuf, counts=recvcounts, op=op),
            info,
            stream,
            algorithm,
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
    ) -> MPI.Prequest:
        """Prepare `Reduce_scatter_block`; return its request."""
        return self._collectives.prepare(
            REDUCE_SCATTER_BLOCK, Arguments(send=sendbuf, receive=recvbuf, op=op), info, stream, algorithm
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
        return self._collectives.prepare(SCAN, Arguments(send=sendbuf, receive=recvbuf, op=op), info, stream, algorithm)

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
        return self._collectives.prepare(
            SCATTER, Arguments(send=sendbuf, receive=recvbuf, root=root), info, stream, algorithm
        )

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
        return self._collectives.prepare(
            SCATTERV, Arguments(send=sendbuf, receive=recvbuf, root=root), info, stream, algorithm
        )
