"""The cases as calls of methods that mpi4py and mpicomm both have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mpi4py import MPI

import mpicomm
from mpicomm.bench.machine import Call
from mpicomm.bench.operations import ROOT, SENDRECV, Case, CaseBuffers
from mpicomm.collectives.operations import Operation as Collective
from mpicomm.mpi.spec import Shape

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN, "avg": mpicomm.AVG}


def mpi_call(comm: MPI.Intracomm, case: Case, buffers: CaseBuffers, options: dict[str, Any]) -> Call:
    """Return a case as a call of ``comm``'s method with these keyword arguments."""
    collective = case.operation.collective
    if collective is not None:
        return partial(getattr(comm, collective.name), *_arguments(collective, case, buffers), **options)
    if case.operation is SENDRECV:
        # The buffers go as bytes, because MPI carries messages of host arrays and does not know all types.
        to, source = case.following, case.previous
        return partial(comm.Sendrecv, buffers.send, to, recvbuf=buffers.receive, source=source, **options)
    return partial(comm.Barrier, **options)


def _arguments(collective: Collective, case: Case, buffers: CaseBuffers) -> list[Any]:
    send = _buffer(buffers.send, case, collective.send, case.sent)
    receive = _buffer(buffers.receive, case, collective.receive, case.received)
    given = {"buf": receive, "sendbuf": send, "recvbuf": receive, "op": _OPS[case.op], "root": ROOT}
    if case.shares_buffer:
        given["recvbuf" if collective.rooted == "send" else "sendbuf"] = MPI.IN_PLACE
        if collective.reduces:
            given["recvbuf"] = send  # one buffer holds the input of all blocks, and the result goes to its front
    return [given[name] for name in collective.arguments]


def _buffer(array: Any, case: Case, shape: Shape, layout: Callable[[], tuple[list[int], list[int]]]) -> Any:
    """Return bytes as a buffer of elements. A type that is not NumPy's own gives a buffer with the name of the type.

    This buffer has no count, because in a buffer with a block for each rank a count is the count of one block.
    """
    if array is None:
        return None
    native = case.dtype.isbuiltin == 1
    places = [layout()] if shape == "vector" else []
    parts = [array.view(case.dtype) if native else array, *places, *([] if native else [case.dtype.name])]
    return parts if len(parts) > 1 else parts[0]
