"""The blocking collectives of a Communicator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI
from numpy import ndarray

from mpicomm.collectives.dispatch import Collectives
from mpicomm.collectives.host.fast_path import LIMITS, MPI_TYPES, are_apart, is_plain
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
from mpicomm.mpi.ops import AVG

# MPI's own, found once: `super()` takes a tenth of the time of a small call.
_allgather = MPI.Intracomm.Allgather
_allgatherv = MPI.Intracomm.Allgatherv
_allreduce = MPI.Intracomm.Allreduce
_alltoall = MPI.Intracomm.Alltoall
_alltoallv = MPI.Intracomm.Alltoallv
_barrier = MPI.Intracomm.Barrier
_bcast = MPI.Intracomm.Bcast
_exscan = MPI.Intracomm.Exscan
_gather = MPI.Intracomm.Gather
_gatherv = MPI.Intracomm.Gatherv
_reduce = MPI.Intracomm.Reduce
_reduce_scatter = MPI.Intracomm.Reduce_scatter
_reduce_scatter_block = MPI.Intracomm.Reduce_scatter_block
_scan = MPI.Intracomm.Scan
_scatter = MPI.Intracomm.Scatter
_scatterv = MPI.Intracomm.Scatterv


class BlockingCollectives(MPI.Intracomm):
    """mpi4py's collectives on arrays of the host or of a GPU.

    Arguments are mpi4py's. Collective. On host arrays they block; on device arrays they are stream-ordered: they return
    when enqueued on ``stream``, by default the current stream of the library the array comes from, and the result is
    there for later work on it. Reductions are in rank order and bitwise the same on all ranks, in every run; small host
    arrays, which MPI reduces, have MPI's order.

    ``algorithm`` is the same on all ranks: "auto"; "one_shot", every rank sends to every rank; "two_shot" (Allreduce,
    Bcast, and Reduce on GPUs), each rank reduces or sends on a part; "ring" (Allreduce), to the next rank alone, in an
    order of reduction of its own; "chain" (Bcast, and Reduce to the first or last rank, on GPUs; not of floats of 16
    bits or fewer, nor ``AVG``), each rank sends on what it receives; "copy_engine" (Allgather, Allreduce, Alltoall,
    Bcast, Gather, Reduce, Reduce_scatter_block, Scatter on GPUs), which leaves most multiprocessors free; "mpi". Where
    the output of Allgather, Allreduce, Alltoall or Bcast lies in a `SymmetricArray`, it does so on all ranks and at the
    same place: large messages are stored straight into it.

    Raises `InvalidUsageError` (a ValueError) and TypeError for bad arguments, on the ranks that pass them; `PeerError`,
    on all ranks, where they call different things; `CollectiveTimeoutError` for a rank that does not come. On device
    arrays the last two are raised by the next call, or ``check()``.
    """

    _collectives: Collectives
    _block_limit: int
    """The limit of Gather and of Scatter, shared out among the ranks."""

    def Barrier(self, *, stream: Any = None) -> None:
        """Return when all ranks have called it; with ``stream``, hold that until the streams of all ranks are there."""
        if stream is None:
            _barrier(self)
        else:
            self._collectives.barrier(stream)

    def Allgather(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Every rank's block r of ``recvbuf`` is what rank r sends."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Allgather"]):
            return _allgather(self, sendbuf, recvbuf)
        return self._collectives.run(ALLGATHER, stream, algorithm, sendbuf, recvbuf)

    def Allgatherv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Allgather, with blocks of any counts and places."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Allgatherv"]):
            return _allgatherv(self, sendbuf, recvbuf)
        return self._collectives.run(ALLGATHERV, stream, algorithm, sendbuf, recvbuf)

    def Allreduce(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Every rank's ``recvbuf`` is the reduction of all ranks' ``sendbuf``."""
        # As is_plain, spelled out: see Bcast.
        if (
            type(recvbuf) is type(sendbuf) is ndarray
            and stream is None
            and algorithm == "auto"
            and op is not AVG
            and recvbuf.nbytes < LIMITS["Allreduce"]
            and recvbuf.dtype in MPI_TYPES
            and ((recvbuf.base is sendbuf.base is None and recvbuf is not sendbuf) or are_apart(sendbuf, recvbuf))
        ):
            return _allreduce(self, sendbuf, recvbuf, op)
        return self._collectives.run(ALLREDUCE, stream, algorithm, sendbuf, recvbuf, op)

    def Alltoall(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Block r of rank s's ``recvbuf`` is block s of rank r's ``sendbuf``."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Alltoall"]):
            return _alltoall(self, sendbuf, recvbuf)
        return self._collectives.run(ALLTOALL, stream, algorithm, sendbuf, recvbuf)

    def Alltoallv(self, sendbuf: Any, recvbuf: Any, *, stream: Any = None, algorithm: str = "auto") -> None:
        """As Alltoall, with blocks of any counts and places."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Alltoallv"]):
            return _alltoallv(self, sendbuf, recvbuf)
        return self._collectives.run(ALLTOALLV, stream, algorithm, sendbuf, recvbuf)

    def Bcast(self, buf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Every rank's ``buf`` is the root's."""
        # As is_plain, spelled out here and in Allreduce: MPI takes about a microsecond for 8 bytes, a call a twentieth.
        if (
            stream is None
            and algorithm == "auto"
            and type(buf) is ndarray
            and buf.nbytes < LIMITS["Bcast"]
            and buf.dtype in MPI_TYPES
        ):
            return _bcast(self, buf, root)
        return self._collectives.run(BCAST, stream, algorithm, None, buf, root=root)

    def Exscan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of ``sendbuf`` of the ranks before r; rank 0's is left alone."""
        if stream is None and algorithm == "auto" and op is not AVG and is_plain(sendbuf, recvbuf, LIMITS["Exscan"]):
            return _exscan(self, sendbuf, recvbuf, op)
        return self._collectives.run(EXSCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Gather(self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto") -> None:
        """Block r of the root's ``recvbuf`` is what rank r sends."""
        if stream is None and algorithm == "auto" and is_plain(recvbuf, sendbuf, self._block_limit):
            return _gather(self, sendbuf, recvbuf, root)
        return self._collectives.run(GATHER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Gatherv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """As Gather, with blocks of any counts and places."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Gatherv"]):
            return _gatherv(self, sendbuf, recvbuf, root)
        return self._collectives.run(GATHERV, stream, algorithm, sendbuf, recvbuf, root=root)

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
        if stream is None and algorithm == "auto" and op is not AVG and is_plain(recvbuf, sendbuf, LIMITS["Reduce"]):
            return _reduce(self, sendbuf, recvbuf, op, root)
        return self._collectives.run(REDUCE, stream, algorithm, sendbuf, recvbuf, op, root)

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
        """As Reduce_scatter_block, with blocks of ``recvcounts`` elements; who receives none need not be in place."""
        if (
            stream is None
            and algorithm == "auto"
            and op is not AVG
            and recvcounts is not None
            and is_plain(recvbuf, sendbuf, LIMITS["Reduce_scatter"])
        ):
            return _reduce_scatter(self, sendbuf, recvbuf, recvcounts, op)
        return self._collectives.run(REDUCE_SCATTER, stream, algorithm, sendbuf, recvbuf, op, counts=recvcounts)

    def Reduce_scatter_block(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of block r of all ranks' ``sendbuf``."""
        if (
            stream is None
            and algorithm == "auto"
            and op is not AVG
            and is_plain(recvbuf, sendbuf, LIMITS["Reduce_scatter_block"])
        ):
            return _reduce_scatter_block(self, sendbuf, recvbuf, op)
        return self._collectives.run(REDUCE_SCATTER_BLOCK, stream, algorithm, sendbuf, recvbuf, op)

    def Scan(
        self, sendbuf: Any, recvbuf: Any, op: MPI.Op = MPI.SUM, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Rank r's ``recvbuf`` is the reduction of ``sendbuf`` of the ranks up to r."""
        if stream is None and algorithm == "auto" and op is not AVG and is_plain(sendbuf, recvbuf, LIMITS["Scan"]):
            return _scan(self, sendbuf, recvbuf, op)
        return self._collectives.run(SCAN, stream, algorithm, sendbuf, recvbuf, op)

    def Scatter(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """Every rank's ``recvbuf`` is its block of the root's ``sendbuf``."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, self._block_limit):
            return _scatter(self, sendbuf, recvbuf, root)
        return self._collectives.run(SCATTER, stream, algorithm, sendbuf, recvbuf, root=root)

    def Scatterv(
        self, sendbuf: Any, recvbuf: Any, root: int = 0, *, stream: Any = None, algorithm: str = "auto"
    ) -> None:
        """As Scatter, with blocks of any counts and places."""
        if stream is None and algorithm == "auto" and is_plain(sendbuf, recvbuf, LIMITS["Scatterv"]):
            return _scatterv(self, sendbuf, recvbuf, root)
        return self._collectives.run(SCATTERV, stream, algorithm, sendbuf, recvbuf, root=root)
