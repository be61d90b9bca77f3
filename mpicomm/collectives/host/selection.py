"""The choice between MPI and mapped memory for collectives on host arrays, and the exchanges on mapped memory.

The sizes are measured. `scripts/measuring/measure_host_collectives.py` compares mapped memory with MPICH 5, which
copies from process to process, for 2 and 4 ranks on 2 cores. Reductions gain most, because MPI spends most of their
time between its copies. Collectives that only move data gain little, because memory also bounds them in MPI. They may
lose much, because slots pass from cache to cache, which takes four times as long between cores that share no cache.
"""

from __future__ import annotations

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
    if nodes > 1 or size == 1:
        return NEVER
    few, many = _MAPPED_FROM.get(operation.name, (NEVER, NEVER))
    return many if size > 2 else few


def goes_to_mpi(call: Call, size: int, nodes: int, *, blocking: bool, ordered: bool = False) -> bool:
    """Return whether MPI carries out a call on host arrays; local, with the same answer on all ranks.

    A nonblocking or persistent call becomes a request of MPI. With ``ordered`` MPI carries out no reduction that
    mpicomm has.
    """
    operation, dtype, op = call.operation, call.dtype, call.op
    if dtype is None or call.algorithm == "mpi":
        return True
    if call.algorithm != "auto":
        return False
    # Data that is only moved needs no MPI type: see `Call`. In a reduction MPI fixes no order for expressions of the
    # user, and rounds float16 after every step.
    lacks = op in ("avg", "tree") or (op and is_own(op)) or dtype == np.float16 or types.mpi_datatype(dtype) is None
    if op is not None and (ordered or lacks):
        return False
    return not blocking or call.nbytes is None or call.nbytes < mapped_from(operation, size, nodes)


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


def carry_out(engine: HostEngine, size: int, call: Call, algorithm: str) -> None:
    """Carry out a call that was read, among the ``size`` ranks of a node. Collective, blocking; raises as `run`."""
    scratch = engine.scratch(call.scratch_nbytes)
    engine.run(schedule(call, algorithm, size, scratch), call.signature)
