"""The blocking calls of a Communicator on Python objects. MPI carries them out, and the doctor sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from mpi4py import MPI

from mpicomm.activity.page import begin_by_mpi, by_mpi
from mpicomm.mpi.shown import sending

Given = ParamSpec("Given")
Result = TypeVar("Result")


def _counted(method: Callable[Concatenate[Any, Given], Result]) -> Callable[Concatenate[Any, Given], Result]:
    """Return a collective call of mpi4py that tells the doctor its name."""
    number = by_mpi(method.__name__.replace("barrier", "Barrier"))

    @functools.wraps(method)
    def call(self: Any, /, *given: Given.args, **named: Given.kwargs) -> Result:
        begin_by_mpi(self._row, number)
        return method(self, *given, **named)

    return call


class ObjectCalls(MPI.Intracomm):
    """mpi4py's blocking calls on Python objects, which MPI carries out. `Probes` has the calls that receive."""

    _row: memoryview

    barrier = _counted(MPI.Intracomm.barrier)
    bcast = _counted(MPI.Intracomm.bcast)
    gather = _counted(MPI.Intracomm.gather)
    scatter = _counted(MPI.Intracomm.scatter)
    allgather = _counted(MPI.Intracomm.allgather)
    alltoall = _counted(MPI.Intracomm.alltoall)
    reduce = _counted(MPI.Intracomm.reduce)
    allreduce = _counted(MPI.Intracomm.allreduce)
    scan = _counted(MPI.Intracomm.scan)
    exscan = _counted(MPI.Intracomm.exscan)
    send = sending(MPI.Intracomm.send)
    ssend = sending(MPI.Intracomm.ssend)
