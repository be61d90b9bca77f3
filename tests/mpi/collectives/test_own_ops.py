"""Operations of expressions in places that other tests leave out: MPI, the ring, and refused calls."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, Op

COUNT = 1001
LARGER = "a if abs(a) > abs(b) else b"  # associative, and of numbers that differ commutative


def part(rank: int) -> Any:
    return np.random.default_rng(rank).permutation(COUNT).astype(np.int32) - COUNT // 2


def larger(parts: list[Any]) -> Any:
    result = parts[0]
    for other in parts[1:]:
        result = np.where(np.abs(result) > np.abs(other), result, other)
    return result


def test_mpi_carries_it_out(comm: mpicomm.Communicator, xp: Any) -> None:
    expected = larger([part(rank) for rank in range(comm.size)])
    op = Op(LARGER)
    result = np.empty(COUNT, np.int32)
    MPI.COMM_WORLD.Allreduce(part(comm.rank), result, op)
    assert (result == expected).all()
    staged = xp.zeros(COUNT, xp.int32)
    comm.Allreduce(xp.asarray(part(comm.rank)), staged, op, algorithm="mpi")
    assert (staged == xp.asarray(expected)).all()


def test_reductions_of_objects_call_it(host_comm: mpicomm.Communicator) -> None:
    rank, size, op = host_comm.rank, host_comm.size, Op("a + 2 * b", commute=True)
    assert (op(2, 3), op(True, 0.5), type(op(2, 3))) == (8, 2.0, int)
    assert op(np.float16(60000), np.float16(3000)) == np.inf  # rounded once
    assert host_comm.allreduce(rank + 1, Op("max(a, b)", commute=True)) == size
    parts = np.array([[rank, 1.0], [2.0, -rank]])
    assert (host_comm.allreduce(parts, Op("a + b")) == [[sum(range(size)), size], [2 * size, -sum(range(size))]]).all()
    with pytest.raises(InvalidUsageError, match="is not defined for str"):
        op("a", "b")


def test_the_ring_takes_operations_that_commute(comm: mpicomm.Communicator, xp: Any) -> None:
    send, result = xp.asarray(part(comm.rank)), xp.zeros(COUNT, xp.int32)
    with pytest.raises(InvalidUsageError, match=r'algorithm="ring" of Allreduce: .* does not commute: use "two_shot"'):
        comm.Allreduce(send, result, Op("a - b"), algorithm="ring")
    comm.Allreduce(send, result, Op("max(abs(a), abs(b))", commute=True), algorithm="ring")
    comm.check()
    expected = np.abs(np.stack([part(rank) for rank in range(comm.size)])).max(axis=0)
    # On one rank the only contribution is the result, as in MPI.
    assert (result == xp.asarray(expected if comm.size > 1 else part(0))).all()


def test_calls_that_are_refused(comm: mpicomm.Communicator, xp: Any) -> None:
    send, result = xp.ones(4, xp.float32), xp.zeros(4, xp.float32)
    with pytest.raises(InvalidUsageError, match="op='a & b' is not defined for float32: & is for bool, integer"):
        comm.Allreduce(send, result, Op("a & b"))
    pairs = MPI.FLOAT.Create_contiguous(2).Commit()
    with pytest.raises(InvalidUsageError, match=r"'a - b'.* is for plain element types, not for derived datatypes"):
        comm.Allreduce([send, 2, pairs], [result, 2, pairs], Op("a - b"))
    pairs.Free()
    op = Op("a - b - 1")
    op.Free()
    with pytest.raises(InvalidUsageError, match=r"'a - b - 1'.* was freed: make another"):
        comm.Allreduce(send, result, op)
