"""The blocking collectives: every element type and operation, against the reference, and what only MPI can do."""

from __future__ import annotations

import itertools
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.mpi.types import COVERED
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.inputs.communicator_calls import (
    OF_ONE_TYPE,
    REDUCTIONS,
    Case,
    Prepared,
    algorithms,
    compile_reductions,
    legal_ops,
)
from tests.helpers.references.reductions import Array, dtype_or_skip, reduced
from tests.helpers.rigs.communicators import array_module, communicator

FLOAT32 = np.dtype(np.float32)
KIB = 1024
MIB = 1024 * KIB


def exact_complex_products(comm: mpicomm.Communicator, dtype: np.dtype[Any], op: str) -> bool:
    """Whether the values must give exact products: if the processor can, NumPy fuses products and sums."""
    return comm.device == "cpu" and dtype.kind == "c" and op == "prod"


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


def digest(results: list[Array | None]) -> int:
    return zlib.crc32(b"".join(b"" if result is None else result.tobytes() for result in results))


@pytest.mark.parametrize("name", COVERED)
def test_every_reduction_of_every_type(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    dtype = dtype_or_skip(name)
    compile_reductions(comm, [name])
    cases = []
    for operation, op, seed in itertools.product(REDUCTIONS, legal_ops(name), range(2)):
        for algorithm in ("auto", *algorithms(operation)):
            promised = (algorithm != "auto" or comm.device != "cpu") and not exact_complex_products(comm, dtype, op)
            root, count, in_place = seed * (comm.size - 1), (3, 1025)[seed], seed == 1
            cases.append(Case(operation, dtype, count, op, root, "plain", in_place, algorithm, 0, seed, wild=promised))
    run(comm, xp, cases)


@pytest.mark.parametrize("name", ["S1", "longdouble"])
def test_movements_of_types_that_reductions_lack(host_comm: mpicomm.Communicator, name: str) -> None:
    dtype, size = np.dtype(name), host_comm.size
    mine, everyone = np.full(3, host_comm.rank).astype(dtype), np.zeros((size, 3), dtype)
    for algorithm in ("auto", "one_shot"):
        everyone[:] = 0
        host_comm.Allgather(mine, everyone, algorithm=algorithm)
        assert everyone.tolist() == [[np.array(rank).astype(dtype)] * 3 for rank in range(size)]


@pytest.mark.parametrize(
    ("name", "op"),
    [
        *((name, "sum") for name in ("float16", "bfloat16", "float32", "float64", "complex64")),
        *((name, "max") for name in ("bfloat16", "float32", "float64")),
        ("float32", "prod"),
    ],
)
def test_reductions_in_rank_order_are_bitwise_the_same_on_every_rank_and_for_every_algorithm(
    comm: mpicomm.Communicator, xp: Any, name: str, op: str
) -> None:
    dtype = dtype_or_skip(name)
    # On the host auto is mapped memory from 1 MiB on, and between two ranks from 8 MiB on at the latest.
    large = 8 * MIB if comm.device == "cpu" and comm.size == 2 else 5 * MIB // 4
    few = itertools.product((1, 3, 4097), (False, True))
    for count, in_place in (*few, (large // dtype.itemsize, op == "max")):
        promised = (
            ("one_shot", "two_shot", "auto") if count > 4097 or comm.device != "cpu" else ("one_shot", "two_shot")
        )
        digests: list[int] = []
        for algorithm in promised * 2:
            # Two runs, and two addresses: neither must show.
            case = Case(
                "Allreduce", dtype, count, op, 0, "plain", in_place, algorithm, 8 * (len(digests) % 2), wild=True
            )
            digests.append(digest([each.result() for each in run(comm, xp, [case])]))
        everyone = MPI.COMM_WORLD.allgather(digests)
        assert len({each for rank in everyone for each in rank}) == 1, f"{name} {count}: {everyone}"


@pytest.mark.parametrize("ignored", [0, 5, 1 << 19])
@pytest.mark.parametrize("count", [5, 1 << 19])
@pytest.mark.parametrize("operation", ["Gather", "Reduce", "Scatter"])
def test_what_ranks_that_are_not_the_root_pass_for_its_buffer_is_ignored(
    comm: mpicomm.Communicator, xp: Any, operation: str, count: int, ignored: int
) -> None:
    root = comm.size - 1
    other = Placed(xp, np.full(ignored, -7, np.float64))
    case = Case(operation, FLOAT32, count, root=root)
    prepared = Prepared(case, comm.rank, comm.size, xp)
    send, receive = (other.array if each is None else each for each in prepared.arguments())
    getattr(comm, operation)(send, receive, root=root)
    comm.check()
    prepared.check()
    assert (other.get() == -7).all()


@pytest.mark.parametrize("counts_given", [True, False])
@pytest.mark.parametrize("total", [12, 1 << 19, 1 << 22])
def test_reduce_scatter_takes_parts_of_any_size(
    comm: mpicomm.Communicator, xp: Any, total: int, counts_given: bool
) -> None:
    counts = [1] * (comm.size - 1) + [total - comm.size + 1]
    for number in range(2):
        counts.reverse()
        parts = [values(FLOAT32, total, rank, number) for rank in range(comm.size)]
        send, receive = Placed(xp, parts[comm.rank]), Placed(xp, np.zeros(counts[comm.rank], np.float32))
        given: Any = np.array(counts) if counts_given else None
        # One rank in another form, which must not lead it another way.
        spec = [send.array, total] if comm.rank == 0 else send.array
        comm.Reduce_scatter(spec, receive.array, given)
        comm.check()
        start = sum(counts[: comm.rank])
        assert receive.get().tolist() == reduced("sum", parts)[start : start + counts[comm.rank]].tolist()


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


def test_what_only_mpi_can_do_is_done_by_mpi(comm: mpicomm.Communicator, xp: Any) -> None:
    rank, size = comm.rank, comm.size
    # A derived datatype: every other element.
    column = MPI.FLOAT.Create_vector(4, 1, 2).Commit()
    matrix = Placed(xp, np.arange(8, dtype=np.float32) + 100 * rank)
    comm.Bcast([matrix.array, 1, column], root=size - 1)
    comm.check()
    expected = np.arange(8, dtype=np.float32) + 100 * rank
    expected[::2] += 100 * (size - 1 - rank)
    assert matrix.get().tolist() == expected.tolist()
    column.Free()

    # An operation of the user's.
    def add(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        np.frombuffer(target, np.float64)[:] += np.frombuffer(source, np.float64)

    op = MPI.Op.Create(add, commute=True)
    send, receive = Placed(xp, np.arange(4.0) + rank), Placed(xp, np.zeros(4))
    comm.Allreduce(send.array, receive.array, op)
    comm.check()
    assert receive.get().tolist() == [size * n + sum(range(size)) for n in range(4)]
    op.Free()

    # A pair of value and place.
    pair = Placed(xp, np.array([rank % 2, rank], np.int32))
    best = Placed(xp, np.zeros(2, np.int32))
    comm.Allreduce([pair.array, 1, MPI.INT_INT], [best.array, 1, MPI.INT_INT], MPI.MAXLOC)
    comm.check()
    assert best.get().tolist() == ([1, 1] if size > 1 else [0, 0])


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
