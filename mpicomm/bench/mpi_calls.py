"""The cases as calls of mpi4py's methods, which mpicomm has, too."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

import mpicomm
from mpicomm.bench.machine import Call
from mpicomm.bench.operations import ROOT, Buffers, Case

_OPS = {"sum": MPI.SUM, "prod": MPI.PROD, "max": MPI.MAX, "min": MPI.MIN, "avg": mpicomm.AVG}


def mpi_call(comm: MPI.Intracomm, case: Case, buffers: Buffers, options: dict[str, Any]) -> Call:
    """Return a case as a call of ``comm``'s method with these keyword arguments."""
    op = _OPS[case.op]
    send, receive = _typed(buffers.send, case), _typed(buffers.receive, case)
    input_: Any = MPI.IN_PLACE if case.in_place else send
    name = case.name
    if name == "allreduce":
        return lambda: comm.Allreduce(input_, receive, op, **options)
    if name == "reduce_scatter":
        # In place one buffer holds the input of all blocks, and the result goes to its front.
        output = send if case.in_place else receive
        return lambda: comm.Reduce_scatter_block(input_, output, op, **options)
    if name == "allgather":
        return lambda: comm.Allgather(input_, receive, **options)
    if name == "bcast":
        return lambda: comm.Bcast(receive, ROOT, **options)
    if name in ("reduce", "gather"):
        rooted = input_ if case.at_root else send
        if name == "reduce":
            return lambda: comm.Reduce(rooted, receive, op, ROOT, **options)
        return lambda: comm.Gather(rooted, receive, ROOT, **options)
    if name == "scatter":
        target = MPI.IN_PLACE if case.in_place and case.at_root else receive
        return lambda: comm.Scatter(send, target, ROOT, **options)
    if name == "alltoall":
        return lambda: comm.Alltoall(send, receive, **options)
    if name == "alltoallv":
        places = case.exchanged()
        parts = [[part[0], places, part[1]] if isinstance(part, list) else [part, places] for part in (send, receive)]
        return lambda: comm.Alltoallv(*parts, **options)
    if name == "sendrecv":
        # As bytes, because MPI carries messages of host arrays and does not know all types.
        sent, received, to, source = buffers.send, buffers.receive, case.following, case.previous
        return lambda: comm.Sendrecv(sent, to, recvbuf=received, source=source, **options)
    return lambda: comm.Barrier(**options)


def _typed(array: Any, case: Case) -> Any:
    """Return bytes as elements. A type that is not NumPy's own gives a buffer with the name of the type.

    This buffer has no count, because a count would be that of one block where there is a block for each rank.
    """
    if array is None or case.dtype.isbuiltin == 1:
        return None if array is None else array.view(case.dtype)
    return [array, case.dtype.name]
