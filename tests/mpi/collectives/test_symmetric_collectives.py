"""Collectives whose output is symmetric memory, which the ranks of a node write into directly; and the ring."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import ROOM_NBYTES
from tests.helpers.inputs.communicator_calls import Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_named
from tests.helpers.rigs.communicators import communicator, to_host

FLOAT32 = np.dtype(np.float32)
COUNTS = (1, 5, 4097, 70_001, 1_050_000)
STORED = 20_000_000
"""As many elements from each of 2, 3 or 4 GPUs are stored or copied right into symmetric memory."""


def on_device(xp: Any, array: Any) -> Any:
    copy = xp.asarray(array)
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()
    return copy


def algorithms(comm: mpicomm.Communicator, *more: str) -> tuple[str, ...]:
    return ("auto", "one_shot", *more, *(("copy_engine",) if comm.device != "cpu" else ()))


def call(
    comm: mpicomm.Communicator, xp: Any, name: str, count: int, algorithm: str, output: Any, seed: int, offset: int = 0
) -> Callable[[], None]:
    """Call an operation whose result goes into the array ``output``; return the check of its result."""
    operation, _, place = name.partition(" ")
    # The ring reduces in another order, and so does MPI; "auto" may leave a call on host arrays to MPI.
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


OPERATIONS = ("Allreduce", "Allreduce in place", "Allgather", "Allgather in place", "Alltoall", "Bcast")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_into_symmetric_memory(comm: mpicomm.Communicator, xp: Any, operation: str) -> None:
    around = ("two_shot", "ring")
    along = ("two_shot", "chain") if comm.device != "cpu" else ("two_shot",)
    more = {"Allreduce": around, "Allreduce in place": around, "Bcast": along}
    counts = COUNTS if comm.device != "cpu" else COUNTS[1::2]  # the host takes symmetric memory for any other
    with comm.empty(max(counts) * comm.size + 4 + ROOM_NBYTES, FLOAT32) as array:
        for count in counts:
            for seed, algorithm in enumerate(algorithms(comm, *more.get(operation, ()))):
                for offset in (0, 1, 4):  # elements: the second is not at a multiple of 16 bytes
                    check = call(comm, xp, operation, count, algorithm, array.local, seed, offset)
                    comm.check()
                    check()
                    comm.Barrier()  # the other ranks may write into the memory that is read here from now on


@pytest.mark.parametrize("count", [70_001, 300_001])
def test_calls_follow_each_other_without_a_wait(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    """Each call overwrites the result of the call before, which the same stream copies in between."""
    for algorithm in algorithms(comm):
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


@pytest.mark.parametrize("nbytes", [13 << 20, 33 << 20])
def test_broadcast_that_is_too_large_for_packets(comm: mpicomm.Communicator, xp: Any, nbytes: int) -> None:
    if xp is np:
        pytest.skip("packets are of GPUs")
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


def test_memory_that_is_symmetric_no_more(comm: mpicomm.Communicator, xp: Any) -> None:
    """A known call must not write to the old addresses of the array on the others."""
    if xp is np:
        pytest.skip("calls on host arrays are not kept")
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


@pytest.mark.parametrize("operation", [*OPERATIONS, "Alltoall in place", "Gather", "Scatter", "Reduce", *SCATTERED])
def test_copy_engines_into_ordinary_memory(
    comm: mpicomm.Communicator, xp: Any, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By way of staging memory, in one part and in many."""
    if xp is np:
        pytest.skip("copy engines are of GPUs")
    from mpicomm.collectives.gpu.algorithms.copies import plan as device_copies

    output = xp.empty(max(COUNTS) * comm.size + 4 + ROOM_NBYTES, FLOAT32)
    for smallest in (24 << 20, 64 << 10):
        monkeypatch.setattr(device_copies, "_SMALLEST_NBYTES", smallest)
        for count in COUNTS:
            for seed, offset in enumerate((0, 1)):  # elements: the second is not at a multiple of 16 bytes
                check = call(comm, xp, operation, count, "copy_engine", output, seed, offset)
                comm.check()
                check()


@pytest.mark.parametrize("name", ["int64", "float16", "complex64"])
def test_ring_of_other_types(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    for count in (1, 1001, 100_003):
        prepared = Prepared(Case("Allreduce", np.dtype(name), count, algorithm="ring"), comm.rank, comm.size, xp)
        prepared.run(comm)
        comm.check()
        prepared.check()


@pytest.mark.parametrize("count", [1, 5, 4097, 70_001, 2_100_003])  # the last needs several chunks of each warp
def test_chains_of_every_root_at_any_address(comm: mpicomm.Communicator, xp: Any, count: int) -> None:
    """The calls follow each other without a wait."""
    if xp is np:
        pytest.skip("chains are of GPUs")
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
