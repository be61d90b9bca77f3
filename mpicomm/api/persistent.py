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


class PersistentCollectives(MPI.Intracomm):
    """mpi4py's persistent collectives on arrays of the host or of a GPU.

    MPI's own on host arrays. On device arrays ``Start`` enqueues the collective, and ``Wait`` blocks until it is done;
    ``Free`` gives the request up.
    """

    _collectives: Collectives

    def Allgather_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare a persistent Allgather."""
        return self._collectives.prepare(ALLGATHER, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Allgatherv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare a persistent Allgatherv."""
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
    ) -> MPI.Prequest:
        """Prepare a persistent Allreduce."""
        return self._collectives.prepare(
            ALLREDUCE, Arguments(send=sendbuf, receive=recvbuf, op=op), info, stream, algorithm
        )

    def Alltoall_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare a persistent Alltoall."""
        return self._collectives.prepare(ALLTOALL, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Alltoallv_init(
        self, sendbuf: Any, recvbuf: Any, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare a persistent Alltoallv."""
        return self._collectives.prepare(ALLTOALLV, Arguments(send=sendbuf, receive=recvbuf), info, stream, algorithm)

    def Bcast_init(
        self, buf: Any, root: int = 0, info: MPI.Info = MPI.INFO_NULL, *, stream: Any = None, algorithm: str = "auto"
    ) -> MPI.Prequest:
        """Prepare a persistent Bcast."""
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
        """Prepare a persistent Exscan."""
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
        """Prepare a persistent Gather."""
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
        """Prepare a persistent Gatherv."""
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
        """Prepare a persistent Reduce."""
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
        """Prepare a persistent Reduce_scatter; of host arrays all ranks are in place, or none."""
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
        """Prepare a persistent Reduce_scatter_block."""
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
        """Prepare a persistent Scan."""
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
        """Prepare a persistent Scatter."""
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
        """Prepare a persistent Scatterv."""
        return self._collectives.prepare(
            SCATTERV, Arguments(send=sendbuf, receive=recvbuf, root=root), info, stream, algorithm
        )
