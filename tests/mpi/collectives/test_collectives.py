"""The blocking collectives: every element type and operation, sizes, what only MPI can do, and symmetric memory."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import PeerError
from mpicomm.collectives.host.selection import mapped_threshold
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.types import COVERED
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import ROOM_NBYTES, Placed
from tests.helpers.inputs.communicator_calls import (
    OF_ONE_TYPE,
    REDUCTIONS,
    Case,
    Prepared,
    algorithms,
    compile_reductions,
    legal_ops,
)
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_named, dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator, to_host

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
    nbytes = mapped_threshold(row, comm.size, 1) if comm.device == "cpu" and comm.size > 1 else 5 * MIB // 4
    count = nbytes // dtype.itemsize // (comm.size if row.send == "blocks" else 1) + 7
    for form, in_place in (("plain", False), ("any", True)):
        # Blocks of a Reduce_scatter differ, and may be too few for mapped memory.
        promised = row.send != "by_recvcounts" or comm.device != "cpu"
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


COUNTS = (1, 5, 4097, 70_001, 1_050_000)
STORED = 20_000_000
"""As many elements from each of 2, 3 or 4 GPUs are stored or copied right into symmetric memory."""


def on_device(xp: Any, array: Any) -> Any:
    copy = xp.asarray(array)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return copy


def algorithms_of(comm: mpicomm.Communicator, *more: str) -> tuple[str, ...]:
    return ("auto", "one_shot", *more, *(("copy_engine",) if comm.device != "cpu" else ()))


def called(
    comm: mpicomm.Communicator, xp: Any, name: str, count: int, algorithm: str, output: Any, seed: int, offset: int = 0
) -> Callable[[], None]:
    """Call an operation whose result goes into the array ``output``; return the check of its result."""
    operation, _, place = name.partition(" ")
    # The ring reduces in another order, and so does MPI; "auto" may leave a called on host arrays to MPI.
    wild = algorithm != "ring" and (comm.device != "cpu" or algorithm != "auto")
    case = Case(
        operation,
        FLOAT32,
        count,
        root=seed % comm.size,
        in_place=bool(place),
        algorithm=algorithm,
        offset=4 * offset,
        seed=seed,
        wild=wild,
    )
    prepared = Prepared(case, comm.rank, comm.size, xp, output)
    prepared.run(comm)
    return prepared.check


NAMES = ("Allreduce", "Allreduce in place", "Allgather", "Allgather in place", "Alltoall", "Bcast")


@pytest.mark.parametrize("operation", NAMES)
def test_into_symmetric_memory(comm: mpicomm.Communicator, xp: Any, operation: str) -> None:
    around = ("two_shot", "ring")
    along = ("two_shot", "chain") if comm.device != "cpu" else ("two_shot",)
    more = {"Allreduce": around, "Allreduce in place": around, "Bcast": along}
    counts = COUNTS if comm.device != "cpu" else COUNTS[1::2]  # the host takes symmetric memory for any other
    with comm.empty(max(counts) * comm.size + 4 + ROOM_NBYTES, FLOAT32) as array:
        for count in counts:
            for seed, algorithm in enumerate(algorithms_of(comm, *more.get(operation, ()))):
                for offset in (0, 1, 4):  # elements: the second is not at a multiple of 16 bytes
                    check = called(comm, xp, operation, count, algorithm, array.local, seed, offset)
                    comm.check()
                    check()
                    comm.Barrier()  # the other ranks may write into the memory that is read here from now on


@pytest.mark.parametrize("count", [70_001, 300_001])
def test_calls_follow_each_other_without_a_wait(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    """Each called overwrites the result of the called before, which the same stream copies in between."""
    for algorithm in algorithms_of(comm):
        with comm.empty(count * comm.size, FLOAT32) as array:
            found = []
            for number in range(20):
                mine = on_device(xp, np.full(count, 100 * number + comm.rank, FLOAT32))
                comm.Allgather(mine, array.local, algorithm=algorithm)
                found.append(array.local.copy())
            comm.check()
            for number, copy in enumerate(found):
                blocks = to_host(copy).reshape(comm.size, count)
                assert (blocks == 100 * number + np.arange(comm.size)[:, None]).all()
            comm.Barrier()


@pytest.mark.gpu_alone  # packets are of GPUs
@pytest.mark.parametrize("nbytes", [13 << 20, 33 << 20])
def test_broadcast_that_is_too_large_for_packets(comm: mpicomm.Communicator, xp: Any, nbytes: int) -> None:
    count = nbytes * max(1, comm.size - 1) // 4 + 1  # the ranks but the root have a part of it each
    expected = xp.arange(count, dtype=FLOAT32)
    with comm.zeros(count, FLOAT32) as array:
        ordinary = xp.zeros(count, FLOAT32)
        cases = (array.local, 0, "auto"), (array.local, 1 % comm.size, "copy_engine"), (ordinary, comm.size - 1, "auto")
        for target, root, algorithm in cases:
            target[:] = expected if comm.rank == root else 0
            comm.Bcast(target, root=root, algorithm=algorithm)
            comm.check()
            assert bool((target == expected).all())
            comm.Barrier()


@pytest.mark.gpu_alone  # calls on host arrays are not kept
def test_memory_that_is_symmetric_no_more(comm: mpicomm.Communicator, xp: Any) -> None:
    """A known called must not write to the old addresses of the array on the others."""
    count = STORED
    memory = xp.cuda.MemoryPool().malloc(4 * count * comm.size)
    output = xp.ndarray(count * comm.size, FLOAT32, memptr=memory)
    mine = on_device(xp, np.full(count, comm.rank, FLOAT32))
    for _ in range(2):
        with comm.register(output) as array:
            for _ in range(3):
                comm.Allgather(mine, array.local)
            comm.check()
            comm.Barrier()
        for _ in range(3):
            output.fill(-1)
            comm.Allgather(mine, output)
            comm.check()
            assert bool((output.reshape(comm.size, count) == xp.arange(comm.size)[:, None]).all())


def test_of_data_with_gaps_on_one_rank(comm: mpicomm.Communicator, xp: Any) -> None:
    """It packs its data, and stores into the memory of its peers as they do into its own."""
    count = STORED if xp is not np else 70_001
    every_other = MPI.FLOAT.Create_vector(count, 1, 2).Commit()
    mine: Any = xp.full(2 * count, comm.rank, FLOAT32)
    if comm.rank == 0:
        mine[1::2] = -1
    with comm.zeros(count * comm.size, FLOAT32) as array:
        for _ in range(3):
            comm.Allgather([mine, 1, every_other] if comm.rank == 0 else mine[:count], array.local)
            comm.check()
            assert bool((array.local.reshape(comm.size, count) == xp.arange(comm.size)[:, None]).all())
            comm.Barrier()
            array.local[:] = -2
            comm.check()
            comm.Barrier()
    every_other.Free()


def test_different_places_are_an_error_on_all_ranks(device: str) -> None:
    if device == "cpu" or MPI.COMM_WORLD.size == 1:
        pytest.skip("needs several GPUs")
    comm = communicator(device, timeout_s=stretched(10.0))
    import cupy

    with cupy.cuda.Device(comm.device):
        array = comm.zeros(STORED * comm.size + 1, FLOAT32)
        offset = int(comm.rank == 0)
        output = array.local[offset : offset + STORED * comm.size]
        with raises_everywhere(
            MPI.COMM_WORLD, PeerError, match=r"rank 0: .* byte 4 of symmetric .*rank 1: .* byte 0 of"
        ):
            comm.Allgather(cupy.zeros(STORED, FLOAT32), output)
            comm.check()
    comm.Free()


SCATTERED = ("Reduce_scatter_block", "Reduce_scatter_block in place")


@pytest.mark.gpu_alone  # copy engines are of GPUs
@pytest.mark.parametrize("operation", [*NAMES, "Alltoall in place", "Gather", "Scatter", "Reduce", *SCATTERED])
def test_copy_engines_into_ordinary_memory(
    comm: mpicomm.Communicator, xp: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of staging memory, in one part and in many."""
    from mpicomm.collectives.gpu.algorithms.copies import plan as device_copies

    output = xp.empty(max(COUNTS) * comm.size + 4 + ROOM_NBYTES, FLOAT32)
    for smallest in (24 << 20, 64 << 10):
        monkeypatch.setattr(device_copies, "_SMALLEST_NBYTES", smallest)
        for count in COUNTS:
            for seed, offset in enumerate((0, 1)):  # elements: the second is not at a multiple of 16 bytes
                check = called(comm, xp, operation, count, "copy_engine", output, seed, offset)
                comm.check()
                check()


@pytest.mark.parametrize("name", ["int64", "float16", "complex64"])
def test_ring_of_other_types(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    for count in (1, 1001, 100_003):
        prepared = Prepared(Case("Allreduce", np.dtype(name), count, algorithm="ring"), comm.rank, comm.size, xp)
        prepared.run(comm)
        comm.check()
        prepared.check()


@pytest.mark.gpu_alone  # chains are of GPUs
@pytest.mark.parametrize("count", [1, 5, 4097, 70_001, 2_100_003])  # the last needs several chunks of each warp
def test_chains_of_every_root_at_any_address(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    """The calls follow each other without a wait."""
    ranks, kinds = range(comm.size), (("float32", "sum"), ("float64", "prod"), ("int16", "sum"), ("uint8", "max"))
    moved = itertools.product((("int8", ""), ("float32", ""), ("complex128", "")), ranks, (0, 4), (False,))
    choices = itertools.product((*kinds, ("complex64", "sum")), {0, comm.size - 1}, (0, 8), (False, True))
    prepared = []
    for (name, op), root, offset, in_place in (*moved, *choices):
        case = Case("Reduce" if op else "Bcast", dtype_named(name), count, op or "sum", root, in_place=in_place)
        case = replace(case, algorithm="chain", offset=offset, seed=count + offset, wild=True)
        prepared.append(Prepared(case, comm.rank, comm.size, xp))
        prepared[-1].run(comm)
    comm.check()
    for each in prepared:
        each.check()
