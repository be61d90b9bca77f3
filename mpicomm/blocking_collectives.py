"""The blocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from mpicomm.collectives.calls import Arguments
from mpicomm.collectives.dispatcher import MPI_CODES, SMALL_NBYTES, Collectives, is_small
from mpicomm.collectives.ops import AVG

_mpi_allreduce = MPI.Intracomm.Allreduce


class BlockingCollectives(MPI.Intracomm):
    """mpi4py's collectives on arrays of the host or of a GPU.

    Arguments are mpi4py's. Collective. On host arrays they block; on device arrays they are stream-ordered: they return
    when enqueued on ``stream``, by default the current stream of the library the array comes from, and the result is
    there for later work on it. ``algorithm`` is "auto", "mpi", "one_shot" or, for Allreduce and Bcast, "two_shot";
    it is the same on all ranks. Reductions are in rank order and bitwise the same on all ranks, in every run; small
    host arrays, which MPI reduces, have MPI's order.

    Raises `InvalidUsageError` (a ValueError) and TypeError for bad arguments, on the ranks that pass them; `PeerError`,
    on all ranks, where they call different things; `CollectiveTimeoutError` for a rank that does not come. On device
    arrays the last two are raised by the next call, or ``check()``.
    """

    _collectives: Collectives

    def Barrier(self, *, stream: Any = None) -> None:
        """Return when all ranks have called it; with ``stream``, hold that until the streams of all ranks are there."""
        if stream is None:
            super().Barrier()
        else:
            self._collectives.barrier(stream)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Every rank's block r of ``recvbuf`` is what rank r sends."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Allgather(sendbuf, recvbuf)
        return self._collectives.run("Allgather", Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Allgather, with blocks of any counts and places."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Allgatherv(sendbuf, recvbuf)
        return self._collectives.run("Allgatherv", Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Every rank's ``recvbuf`` is the reduction of all ranks' ``sendbuf``."""
        # As is_small, spelled out: MPI takes about a microsecond for 8 bytes, and a call would be a tenth of that.
        if (
            type(recvbuf) is type(sendbuf) is ndarray
            and recvbuf.nbytes <= SMALL_NBYTES
            and recvbuf.dtype.char in MPI_CODES
            and stream is None
            and algorithm == "auto"
            and op is not AVG
        ):
            return _mpi_allreduce(self, sendbuf, recvbuf, op)
        return self._collectives.run("Allreduce", Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Block r of rank s's ``recvbuf`` is block s of rank r's ``sendbuf``."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Alltoall(sendbuf, recvbuf)
        return self._collectives.run("Alltoall", Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Alltoall, with blocks of any counts and places."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Alltoallv(sendbuf, recvbuf)
        return self._collectives.run("Alltoallv", Arguments(send=sendbuf, receive=recvbuf), stream, algorithm)

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Every rank's ``buf`` is the root's."""
        if algorithm == "auto" and stream is None and is_small(buf, buf):
            return super().Bcast(buf, root)
        return self._collectives.run("Bcast", Arguments(receive=buf, root=root), stream, algorithm)

    def Exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of ``sendbuf`` of the ranks before r; rank 0's is left alone."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf) and op is not AVG:
            return super().Exscan(sendbuf, recvbuf, op)
        return self._collectives.run("Exscan", Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Block r of the root's ``recvbuf`` is what rank r sends."""
        return self._collectives.run("Gather", Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """As Gather, with blocks of any counts and places."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Gatherv(sendbuf, recvbuf, root)
        return self._collectives.run("Gatherv", Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Reduce(
        self,
        sendbuf: Any,
        recvbuf: Any,
        op: MPI.Op = MPI.SUM,
        root: int = 0,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> None:
        """The root's ``recvbuf`` is the reduction of all ranks' ``sendbuf``."""
        # The other way round: what ranks that are not the root pass as recvbuf may be anything.
        if algorithm == "auto" and stream is None and is_small(recvbuf, sendbuf) and op is not AVG:
            return super().Reduce(sendbuf, recvbuf, op, root)
        return self._collectives.run(
            "Reduce", Arguments(send=sendbuf, receive=recvbuf, op=op, root=root), stream, algorithm
        )

    def Reduce_scatter(
        self,
        sendbuf: Any,
        recvbuf: Any,
        recvcounts: Sequence[int] | None = None,
        op: MPI.Op = MPI.SUM,
        *,
        stream: Any = None,
        algorithm: str = "auto",
    ) -> None:
        """As Reduce_scatter_block, with blocks of ``recvcounts`` elements."""
        return self._collectives.run(
            "Reduce_scatter", Arguments(send=sendbuf, receive=recvbuf, counts=recvcounts, op=op), stream, algorithm
        )

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of block r of all ranks' ``sendbuf``."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf) and op is not AVG:
            return super().Reduce_scatter_block(sendbuf, recvbuf, op)
        return self._collectives.run(
            "Reduce_scatter_block", Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm
        )

    def Scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of ``sendbuf`` of the ranks up to r."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf) and op is not AVG:
            return super().Scan(sendbuf, recvbuf, op)
        return self._collectives.run("Scan", Arguments(send=sendbuf, receive=recvbuf, op=op), stream, algorithm)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Every rank's ``recvbuf`` is its block of the root's ``sendbuf``."""
        return self._collectives.run("Scatter", Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)

    def Scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """As Scatter, with blocks of any counts and places."""
        if algorithm == "auto" and stream is None and is_small(sendbuf, recvbuf):
            return super().Scatterv(sendbuf, recvbuf, root)
        return self._collectives.run("Scatterv", Arguments(send=sendbuf, receive=recvbuf, root=root), stream, algorithm)
