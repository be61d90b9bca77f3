"""The choice between MPI and mapped memory for collectives on host arrays, and the exchanges on mapped memory.

The sizes are measured. `scripts/measuring/measure_host_collectives.py` compares mapped memory with MPICH 5, which
copies from process to process, for 2 and 4 ranks on 2 cores. Reductions gain most, because MPI spends most of their
time between its copies. Collectives that only move data gain little, because memory also bounds them in MPI. They may
lose much, because slots pass from cache to cache, which takes four times as long between cores that share no cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomm.collectives.call import Call
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.engine import HostEngine
from mpicomm.collectives.operations import Operation
from mpicomm.kernels.reductions import is_own
from mpicomm.mpi import types
from mpicomm.mpi.arguments import Span

_KIB = 1024
_MIB = 1024 * _KIB
NEVER = 1 << 63
"""More bytes than a call has."""

_MAPPED_FROM = {
    "Allreduce": (_MIB, _MIB),
    "Reduce": (128 * _KIB, 128 * _KIB),
    "Reduce_scatter": (4 * _MIB, 16 * _MIB),
    "Reduce_scatter_block": (4 * _MIB, 16 * _MIB),
    "Scan": (256 * _KIB, 256 * _KIB),
    "Exscan": (128 * _KIB, 256 * _KIB),
}
"""The fewest bytes for mapped memory, with 2 ranks and with more ranks. MPI carries out operations that only move data
at any size. One rank may pass a derived datatype, which only MPI knows, while another rank passes plain elements. Also,
MPI copies once in Allgather, Alltoall and Bcast, but mapped memory copies twice."""

_TWO_SHOT_FROM = {"Allreduce": _MIB}
_SHARD_NBYTES = _MIB


def mapped_from(operation: Operation, size: int, nodes: int) -> int:
    """Return the fewest bytes with which a collective goes through mapped memory; `NEVER` if it does not. Local.

    Ranks of several nodes cannot map each other's memory.
    """
    if not operation.in_mpi:
        return 0
    if nodes > 1 or size == 1:
        return NEVER
    few, many = _MAPPED_FROM.get(operation.name, (NEVER, NEVER))
    return many if size > 2 else few


def mpi_has(operation: Operation, dtype: np.dtype[Any] | None, op: str | None) -> bool:
    """Return whether MPI can carry out a collective with this element type and op, with mpicomm's promises; local."""
    if not operation.in_mpi:
        return False
    if dtype is None:
        return True
    if op is None:
        return True  # data that is only moved needs no MPI type: see `Call`
    if op in ("avg", "tree") or is_own(op) or dtype == np.float16:
        return False  # MPI fixes no order for expressions of the user, and rounds float16 after every step
    return types.mpi_datatype(dtype) is not None


def goes_to_mpi(call: Call, algorithm: str, size: int, nodes: int, *, ordered: bool = False) -> bool:
    """Return whether MPI carries out a blocking call on host arrays; local, with the same answer on all ranks.

    With ``ordered`` MPI carries out no reduction that mpicomm has.
    """
    if call.dtype is None or algorithm == "mpi":
        return True
    if algorithm == "auto" and mpi_has(call.operation, call.dtype, call.op):
        if ordered and call.op is not None:
            return False
        return call.nbytes is None or call.nbytes < mapped_from(call.operation, size, nodes)
    return False


def becomes_mpi_request(call: Call, algorithm: str, *, ordered: bool = False) -> bool:
    """As `goes_to_mpi`, for a nonblocking or persistent call, which becomes a request of MPI."""
    if call.dtype is None or algorithm == "mpi":
        return True
    if ordered and call.op is not None:
        return False
    return algorithm == "auto" and mpi_has(call.operation, call.dtype, call.op)


def algorithms_for(operation: Operation) -> tuple[str, ...]:
    """Return the algorithms that a collective has on mapped memory; none if MPI carries out all calls."""
    if operation.of_neighbors or operation.send == "typed":
        return ()
    # With two shots every rank sends on data from its output, so all ranks must have an output.
    names = ["one_shot"] + ["two_shot"] * (operation.into_all and operation.two_shot is not None)
    return tuple(names + ["ring"] * (operation.ring is not None))


def best_mapped(operation: Operation, nbytes: int) -> str:
    """Return the algorithm for a collective of ``nbytes`` on mapped memory; local."""
    return "two_shot" if nbytes >= _TWO_SHOT_FROM.get(operation.name, NEVER) else "one_shot"


def schedule(call: Call, algorithm: str, size: int, scratch: Span | None) -> list[Exchange]:
    """Return a call on mapped memory as exchanges."""
    operation, buffers = call.operation, call.buffers(scratch)
    if algorithm == "ring":
        assert operation.ring is not None
        return operation.ring(buffers)
    two_shot = operation.two_shot
    if algorithm == "auto":
        algorithm = best_mapped(operation, call.nbytes or 0)
    if two_shot is None or size == 1 or algorithm == "one_shot":
        return [operation.one_shot(buffers)]
    # A piece has a shard for each rank. A shard is small enough to stay in the cache until the second exchange reads
    # it.
    pieces = [two_shot(piece) for piece in buffers.pieces(_SHARD_NBYTES * size)]
    return [exchange for piece in pieces for exchange in (piece.first, piece.second)]


class OneNode:
    """Carries out calls with ``engine``, which serves all ``size`` ranks."""

    def __init__(self, engine: HostEngine, size: int) -> None:
        self._engine = engine
        self._size = size

    def run(self, call: Call, algorithm: str) -> None:
        """Carry out a call that was read. Collective, blocking; raises as `HostEngine.run` does."""
        scratch = self._engine.scratch(call.scratch_nbytes)
        self._engine.run(schedule(call, algorithm, self._size, scratch), call.signature)
