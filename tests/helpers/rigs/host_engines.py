"""Host engines without a communicator, and the arrays of their exchanges."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import CallLog
from mpicomm.collectives.checks import Signature
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.mpi.arguments import Span
from tests.helpers.inputs import patterns

Array = npt.NDArray[Any]

SMALL = 4096  # bytes per slot: many chunks without many bytes
CALL = Signature("Test", "any")
FLOAT32 = np.dtype(np.float32)


@contextlib.contextmanager
def engine_of(
    comm: MPI.Intracomm,
    *,
    slot_nbytes: int = SMALL,
    slots: int = 2,
    first: int = 0,
    timeout_s: float = 20.0,
    by_mpi: Callable[[int], str] = lambda rank: "",
) -> Iterator[tuple[HostEngine, CallLog, Group]]:
    """An engine of all ranks; given back in two steps, as a communicator does it, also if it is broken."""
    private = comm.Dup()
    node = Group(private, range(comm.size), timeout_s)
    call_log = CallLog(node, by_mpi=by_mpi)
    engine = HostEngine(node, call_log, slot_nbytes=slot_nbytes, slots=slots, first=first)
    try:
        yield engine, call_log, node
    finally:
        for part in (engine, call_log):
            part.close_peers()
            comm.Barrier()
            part.close_own()
        private.Free()


def meet(comm: MPI.Intracomm, engine: HostEngine) -> None:
    """A call that no rank leaves before all have come."""
    met = np.zeros(comm.size, np.float32)
    mine = span(met[comm.rank : comm.rank + 1])
    engine.run(patterns.allgather(comm.rank, comm.size, FLOAT32, mine, spans(met, [1] * comm.size)), CALL)


def span(array: Array) -> Span:
    assert array.flags.c_contiguous
    return Span(array.ctypes.data, array.size)


def spans(array: Array, counts: Sequence[int]) -> list[Span]:
    displs = [sum(counts[:index]) for index in range(len(counts))]
    return patterns.blocks(array.ctypes.data, counts, displs, array.itemsize)
