"""The blocking collectives: every element type and operation, sizes, and what only MPI can do."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.host.selection import mapped_from
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import (
    OF_ONE_TYPE,
    REDUCTIONS,
    Case,
    Prepared,
    algorithms,
    compile_reductions,
    legal_ops,
)
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator

FLOAT32 = np.dtype(np.float32)
MIB = 1 << 20


def run(comm: mpicomm.Communicator, xp: Any, cases: list[Case]) -> list[Prepared]:
    """Run all calls, then look at all results."""
    prepared = []
    for case in cases:
        prepared.append(Prepared(case, comm.rank, comm.size, xp))
        try:
            prepared[-1].run(comm)
        except Exception as error:
            raise AssertionError(f"{case}: {type(error).__name__}: {error}") from error
    comm.check()
    for each in prepared:
        each.check()
    return prepared


@pytest.mark.parametrize("name", COVERED)
def test_reductions_have_the_same_bits_by_every_algorithm_on_every_rank(
    comm: mpicomm.Communicator, xp: Any, name: str
) -> None:
    """Of all types and operations; where an order is promised, that of the ranks, in two runs at two addresses."""
    dtype = dtype_or_skip(name)
    compile_reductions(comm, [name])
    for number, op in enumerate(legal_ops(name)):
        # If the processor can, NumPy fuses products and sums of complex numbers, so their bits may differ.
        fused = comm.device == "cpu" and dtype.kind == "c" and op == "prod"
        for operation in dict.fromkeys(("Allreduce", REDUCTIONS[number % len(REDUCTIONS)])):
            digests = set()
            runs = 2 if operation == "Allreduce" else 1
            for turn, algorithm in enumerate(runs * ("auto", *algorithms(operation))):
                promised = algorithm != "auto" or comm.device != "cpu"
                case = Case(
                    *(operation, dtype, (3, 1025)[number % 2], op, turn % comm.size),
                    form="any",
                    in_place=turn % 2 == 1,
                    algorithm=algorithm,
                    offset=dtype.itemsize * (turn % 3),
                    seed=number,
                    wild=promised and not fused,
                )
                result = run(comm, xp, [case])[0].result()
                if promised and operation == "Allreduce" and result is not None:
                    digests.add(zlib.crc32(result.tobytes()))
            assert len(set().union(*MPI.COMM_WORLD.allgather(digests))) <= 1, (name, op)


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_large_reductions(comm: mpicomm.Communicator, xp: Any, operation: str) -> None:
    """On the host they go through mapped memory, in the order of the ranks."""
    row, dtype = OPERATIONS[operation], np.dtype(np.float64)
    nbytes = mapped_from(row, comm.size, 1) if comm.device == "cpu" and comm.size > 1 else 5 * MIB // 4
    count = nbytes // dtype.itemsize // (comm.size if row.send == "blocks" else 1) + 7
    for form, in_place in (("plain", False), ("any", True)):
        # Blocks of a Reduce_scatter differ, and may be too few for mapped memory.
        promised = row.send != "counted" or comm.device != "cpu"
        root = comm.size - 1
        run(comm, xp, [Case(operation, dtype, count, root=root, form=form, in_place=in_place, wild=promised)])


@pytest.mark.mpi(min_size=3)
def test_reduce_scatter_takes_parts_that_only_others_have_changed(comm: mpicomm.Communicator, xp: Any) -> None:
    """The first rank passes the same arguments each time. If its call were taken for the last one, the others would
    wait for it.
    """
    ones = [1] * (comm.size - 3)
    whole, room = xp.arange(12 + len(ones), dtype=FLOAT32), xp.zeros(5, FLOAT32)
    for counts in ([5, 3, 4, *ones], [5, 4, 3, *ones], [5, 3, 4, *ones]):
        mine = room[: counts[comm.rank]]
        comm.Reduce_scatter(whole, mine)
        comm.check()
        start = sum(counts[: comm.rank])
        assert mine.tolist() == [comm.size * (start + index) for index in range(len(mine))]


def test_mpi_reduces_pairs_of_value_and_place(comm: mpicomm.Communicator, xp: Any) -> None:
    pair = Placed(xp, np.array([comm.rank % 2, comm.rank], np.int32))
    best = Placed(xp, np.zeros(2, np.int32))
    comm.Allreduce([pair.array, 1, MPI.INT_INT], [best.array, 1, MPI.INT_INT], MPI.MAXLOC)
    comm.check()
    assert best.get().tolist() == ([1, 1] if comm.size > 1 else [0, 0])


def test_algorithm_mpi_is_mpi(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = MPI.COMM_WORLD.bcast(str(tmp_path))
    monkeypatch.setenv("MPICOMM_TRACE", f"{folder}/%r.json")  # `stats` counts calls if there is a trace
    used = []
    for algorithm in ("mpi", "one_shot"):
        with communicator(device) as comm, array_module(comm) as xp:
            run(comm, xp, [Case(operation, FLOAT32, MIB // 4, algorithm=algorithm) for operation in OF_ONE_TYPE])
            used.append({(row.operation, row.algorithm) for row in comm.stats().rows if row.operation in OF_ONE_TYPE})
    assert used[0] == {(operation, "mpi") for operation in OF_ONE_TYPE}
    assert not used[0] & used[1]


def test_no_rank_leaves_a_barrier_before_all_have_come(comm: mpicomm.Communicator, xp: Any) -> None:
    with comm.zeros(comm.size, np.int32) as arrived:
        for number in range(1, 20):
            for peer in range(comm.size):
                arrived.peer(peer)[comm.rank] = number
            comm.check()
            comm.Barrier()
            here = Placed(xp, np.zeros(comm.size, np.int32))
            here.array[:] = arrived.local
            assert (here.get() == number).all(), f"barrier {number}: {here.get()}"
            comm.check()
            comm.Barrier()
