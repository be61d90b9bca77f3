"""The blocking calls of a Communicator on Python objects. MPI carries them out, and the doctor sees them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from mpicomm.activity.layout import by_mpi
from mpicomm.activity.page import begin_by_mpi
from mpicomm.mpi.shown import sending, sendrecv_object

_allgather = MPI.Intracomm.allgather
_allreduce = MPI.Intracomm.allreduce
_alltoall = MPI.Intracomm.alltoall
_barrier = MPI.Intracomm.barrier
_bcast = MPI.Intracomm.bcast
_exscan = MPI.Intracomm.exscan
_gather = MPI.Intracomm.gather
_reduce = MPI.Intracomm.reduce
_scan = MPI.Intracomm.scan
_scatter = MPI.Intracomm.scatter
_send = sending(MPI.Intracomm.send)
_ssend = sending(MPI.Intracomm.ssend)

_ALLGATHER = by_mpi("allgather")
_ALLREDUCE = by_mpi("allreduce")
_ALLTOALL = by_mpi("alltoall")
_BARRIER = by_mpi("Barrier")
_BCAST = by_mpi("bcast")
_EXSCAN = by_mpi("exscan")
_GATHER = by_mpi("gather")
_REDUCE = by_mpi("reduce")
_SCAN = by_mpi("scan")
_SCATTER = by_mpi("scatter")

Op = Any
"""An operation of MPI, or a function of two objects."""


class ObjectCalls(MPI.Intracomm):
    """mpi4py's blocking calls on Python objects, which MPI carries out. `Probes` has the calls that receive."""

    _row: memoryview

    def barrier(self) -> None:
        """Block until all ranks have called it. Collective."""
        begin_by_mpi(self._row, _BARRIER)
        _barrier(self)

    def bcast(self, obj: Any, root: int = 0) -> Any:
        """Bring the root's object to all ranks; see mpi4py."""
        begin_by_mpi(self._row, _BCAST)
        return _bcast(self, obj, root)

    def gather(self, sendobj: Any, root: int = 0) -> list[Any] | None:
        """Bring the objects of all ranks to the root; see mpi4py."""
        begin_by_mpi(self._row, _GATHER)
        return _gather(self, sendobj, root)

    def scatter(self, sendobj: Sequence[Any] | None, root: int = 0) -> Any:
        """Bring one of the root's objects to each rank; see mpi4py."""
        begin_by_mpi(self._row, _SCATTER)
        return _scatter(self, sendobj, root)

    def allgather(self, sendobj: Any) -> list[Any]:
        """Bring the objects of all ranks to all ranks; see mpi4py."""
        begin_by_mpi(self._row, _ALLGATHER)
        return _allgather(self, sendobj)

    def alltoall(self, sendobj: Sequence[Any]) -> list[Any]:
        """Bring one object of each rank to each rank; see mpi4py."""
        begin_by_mpi(self._row, _ALLTOALL)
        return _alltoall(self, sendobj)

    def reduce(self, sendobj: Any, op: Op = MPI.SUM, root: int = 0) -> Any:
        """Reduce the objects of all ranks to the root; see mpi4py."""
        begin_by_mpi(self._row, _REDUCE)
        return _reduce(self, sendobj, op, root)

    def allreduce(self, sendobj: Any, op: Op = MPI.SUM) -> Any:
        """Reduce the objects of all ranks to all ranks; see mpi4py."""
        begin_by_mpi(self._row, _ALLREDUCE)
        return _allreduce(self, sendobj, op)

    def scan(self, sendobj: Any, op: Op = MPI.SUM) -> Any:
        """Reduce the objects of the ranks up to and including this one; see mpi4py."""
        begin_by_mpi(self._row, _SCAN)
        return _scan(self, sendobj, op)

    def exscan(self, sendobj: Any, op: Op = MPI.SUM) -> Any:
        """Reduce the objects of the ranks before this one; see mpi4py."""
        begin_by_mpi(self._row, _EXSCAN)
        return _exscan(self, sendobj, op)

    def send(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; see mpi4py."""
        _send(self, obj, dest, tag)

    def ssend(self, obj: Any, dest: int, tag: int = 0) -> None:
        """Send an object; return when the receiver has matched the message; see mpi4py."""
        _ssend(self, obj, dest, tag)

    def sendrecv(
        self,
        sendobj: Any,
        dest: int,
        sendtag: int = 0,
        recvbuf: Any = None,
        source: int = MPI.ANY_SOURCE,
        recvtag: int = MPI.ANY_TAG,
        status: MPI.Status | None = None,
    ) -> Any:
        """Send an object and receive another; see mpi4py."""
        return sendrecv_object(self, sendobj, dest, sendtag, recvbuf, source, recvtag, status)
