"""Collectives between ranks of several hosts: every operation, type and form, in every placement of ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.domains import schedules
from tests.helpers.inputs.communicator_calls import MOVEMENTS, REDUCTIONS, Case, Prepared, legal_ops, require_works
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip, reduced
from tests.helpers.rigs.communicators import PLACEMENTS, array_module, complete, groups_on, on_hosts

WORLD = MPI.COMM_WORLD
COUNTS = (0, 1, 1025)
TYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "bool", "complex64")

if WORLD.size == 1:
    pytest.skip("one rank is one peer domain", allow_module_level=True)


@pytest.fixture(scope="module", params=PLACEMENTS)
def placement(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def comm(placement: str, device: str) -> Iterator[mpicomm.Communicator]:
    """One for all tests of a placement."""
    if placement == "one host" and device == "cpu":
        pytest.skip("without GPUs the ranks of a host are one peer domain")
    with on_hosts(placement, device) as shared:
        yield shared
        with array_module(shared) as xp:
            require_works(shared, xp)


def check(comm: mpicomm.Communicator, xp: Any, case: Case) -> None:
    """Make a call three times, and once as each kind of request."""
    prepared = Prepared(case, comm.rank, comm.size, xp)
    prepared.run(comm)
    comm.check()
    prepared.check()
    if case.in_place:
        return
    for seed in (1, 2):  # calls that were made before take a shorter way
        prepared.renew(seed)
        prepared.run(comm)
        comm.check()
        prepared.check()
    prepared.renew(3)
    prepared.start(comm).Wait()
    prepared.check()
    prepared.renew(4)
    complete(prepared.prepare(comm))
    prepared.check()


@pytest.mark.parametrize("operation", REDUCTIONS)
def test_reductions(comm: mpicomm.Communicator, xp: Any, placement: str, operation: str) -> None:
    groups = groups_on(placement, comm.size, str(comm.device))
    algorithms = ("auto", "one_shot", "two_shot") if operation == "Allreduce" else ("auto", "one_shot")
    for number, name in enumerate(TYPES):
        dtype = dtype_or_skip(name)
        ops = legal_ops(name)
        for turn, algorithm in enumerate(algorithms):
            op = ops[(number + turn) % len(ops)]
            in_order = algorithm != "auto" or comm.device != "cpu" or op == "avg"
            if comm.device == "cpu" and (dtype.kind, op) == ("c", "prod"):
                in_order = False  # NumPy fuses products and sums if the processor can
            case = Case(
                operation,
                dtype,
                COUNTS[(number + turn) % 3],
                op=op,
                root=comm.size - 1,
                algorithm=algorithm,
                in_place=turn == 1,
                wild=in_order,
                groups=groups,
            )
            check(comm, xp, case)


@pytest.mark.parametrize("operation", MOVEMENTS)
def test_movements(comm: mpicomm.Communicator, xp: Any, operation: str) -> None:
    for number, form in enumerate(("plain", "any", "any")):
        for algorithm in ("auto", "one_shot"):
            dtype = dtype_or_skip(TYPES[number])
            case = Case(operation, dtype, COUNTS[number], root=1, form=form, algorithm=algorithm)
            check(comm, xp, case)
    check(comm, xp, Case(operation, np.dtype(np.float64), 33, in_place=operation != "Bcast"))


def test_long_calls_go_in_pieces(
    comm: mpicomm.Communicator, xp: Any, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = (3 << 20) + 5
    if comm.device == "cpu":  # shorter ones show as much
        monkeypatch.setattr(schedules, "PIECE_NBYTES", 1 << 18)
        count = (3 << 16) + 5
    for operation in ("Allreduce", "Reduce"):
        case = Case(
            operation,
            dtype_or_skip("bfloat16"),
            count,
            op="avg",
            wild=True,
            groups=groups_on(placement, comm.size, str(comm.device)),
        )
        prepared = Prepared(case, comm.rank, comm.size, xp)
        prepared.run(comm)
        comm.check()
        prepared.check()


def test_operations_that_do_not_commute(comm: mpicomm.Communicator, xp: Any, placement: str) -> None:
    groups = groups_on(placement, comm.size, str(comm.device))
    parts = [np.arange(7, dtype=np.int32) * (rank + 1) for rank in range(comm.size)]
    array, op = xp.asarray(parts[comm.rank]), mpicomm.Op("a * 2 - b")
    result = xp.zeros_like(array)
    if sorted(groups) == list(groups) and sum(groups, ()) == tuple(range(comm.size)):
        comm.Allreduce(array, result, op)
        comm.check()
        assert (result == xp.asarray(reduced(op.expression, parts, groups))).all()
    else:
        with pytest.raises(
            mpicomm.InvalidUsageError, match=r"Allreduce: .* does not commute, and the ranks of a peer domain"
        ):
            comm.Allreduce(array, result, op)
    comm.Scan(array, result, op)
    comm.check()
    assert (result == xp.asarray(reduced(op.expression, parts[: comm.rank + 1]))).all()


def test_epilogues(comm: mpicomm.Communicator, xp: Any) -> None:
    bias = xp.arange(70_001, dtype=xp.float32)
    for count in (7, 70_001):
        send, result = xp.full(count, comm.rank, xp.float32), xp.zeros(count, xp.float32)
        wide = xp.zeros(count, xp.float64)
        for _ in range(2):
            comm.Allreduce(send, result, epilogue="v * n - bias[i]", n=2, bias=bias)
            comm.Allreduce(send, wide, epilogue="v * n", n=0.5)
            comm.check()
            total = comm.size * (comm.size - 1) // 2
            assert (result == 2 * total - bias[:count]).all() and (wide == total / 2).all()


def test_parts_of_the_communicator(comm: mpicomm.Communicator, xp: Any, placement: str) -> None:
    half = comm.Split(comm.rank % 2, comm.rank)
    assert isinstance(half, mpicomm.Communicator)
    ranks = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    hosts = groups_on(placement, comm.size, str(comm.device))
    groups = [tuple(ranks.index(rank) for rank in host if rank in ranks) for host in hosts]
    groups = sorted(group for group in groups if group)
    for algorithm in ("auto", "two_shot"):
        case = Case(
            "Allreduce", dtype_or_skip("float16"), 77, op="avg", algorithm=algorithm, wild=True, groups=tuple(groups)
        )
        check(half, xp, case)
    half.Free()


# Ranks that share no memory, and ranks of several hosts each with ranks beside them.
@pytest.mark.parametrize("placement", ["one each", "in turns"])
def test_messages_of_a_failed_call_reach_no_later_communicator(placement: str) -> None:
    """MPI numbers communicators, and gives the number of one that was freed to the next one."""
    for turn in range(3):
        with on_hosts(placement, "cpu", timeout_s=stretched(3.0)) as comm:
            array, total = np.full(1000, comm.rank + turn, np.float16), np.zeros(1000, np.float16)
            comm.Allreduce(array, total)
            assert (total == sum(rank + turn for rank in range(comm.size))).all()
            op = MPI.SUM if comm.rank % 2 else MPI.PROD
            with pytest.raises(mpicomm.MpicommError, match=r"different things|did not arrive|made no progress"):
                comm.Allreduce(array, total, op)


def test_quantized_elements(comm: mpicomm.Communicator, xp: Any, placement: str) -> None:
    if comm.device == "cpu":
        for row in OPERATIONS.values():
            if row.quantizable:
                check(comm, xp, Case(row.name, np.dtype(np.float32), 1025, wire="int8"))
    elif len(groups_on(placement, comm.size, str(comm.device))) > 1:
        array = xp.ones(5, np.float16)
        with pytest.raises(mpicomm.InvalidUsageError, match='wire_dtype="int8" is for the GPUs of one peer domain'):
            comm.Allreduce(array, xp.empty_like(array), wire_dtype="int8")


@pytest.fixture
def device_comm(comm: mpicomm.Communicator) -> mpicomm.Communicator:
    """``comm``, if it is on GPUs."""
    if comm.device == "cpu":
        pytest.skip("streams are a GPU's, and MPI carries out these calls on host arrays")
    return comm


def test_graphs_hold_calls_if_the_engine_takes_no_host(device_comm: mpicomm.Communicator, xp: Any) -> None:
    send, total = xp.zeros(5000, np.float32), xp.zeros(5000, np.float32)
    blocks, received = xp.zeros(4 * device_comm.size, np.int32), xp.zeros(4 * device_comm.size, np.int32)
    stream = xp.cuda.Stream(non_blocking=True)
    for _ in range(2):  # a graph cannot hold the set-up of a first call
        device_comm.Allreduce(send, total, stream=stream)
        device_comm.Alltoall(blocks, received, stream=stream)
    device_comm.check(stream)
    if device_comm.describe().internode in ("mpi", "pinned"):
        with stream:
            stream.begin_capture()
            with pytest.raises(mpicomm.InvalidUsageError, match="cannot be part of a CUDA graph"):
                device_comm.Allreduce(send, total)
            stream.end_capture()
        return
    with stream:
        stream.begin_capture()
        device_comm.Allreduce(send, total)
        device_comm.Alltoall(blocks, received)
        graph = stream.end_capture()
        for turn in range(20):
            send.fill(turn + device_comm.rank)
            blocks[:] = xp.repeat(xp.arange(device_comm.size, dtype=np.int32), 4) * 100 + device_comm.rank + turn
            graph.launch(stream)
            stream.synchronize()
            assert (total == sum(turn + rank for rank in range(device_comm.size))).all()
            expected = np.repeat(device_comm.rank * 100 + np.arange(device_comm.size) + turn, 4)
            assert received.get().tolist() == expected.tolist()
    device_comm.check(stream)


def test_a_barrier_holds_the_stream_until_all_have_come(device_comm: mpicomm.Communicator, xp: Any) -> None:
    stream = xp.cuda.Stream(non_blocking=True)
    device_comm.Barrier(stream=stream)
    device_comm.check(stream)
    device_comm.Barrier()
    if device_comm.rank == 0:
        time.sleep(0.3)
    start = time.monotonic()
    device_comm.Barrier(stream=stream)
    stream.synchronize()
    assert device_comm.rank == 0 or time.monotonic() - start > 0.2
    device_comm.check(stream)


def test_alltoallw_transposes(device_comm: mpicomm.Communicator, xp: Any) -> None:
    size, rank = device_comm.size, device_comm.rank
    whole = np.arange(2 * size * 3 * size, dtype=np.float64).reshape(2 * size, 3 * size)
    sends = [MPI.DOUBLE.Create_subarray([2, 3 * size], [2, 3], [0, 3 * peer]).Commit() for peer in range(size)]
    receives = [MPI.DOUBLE.Create_subarray([2 * size, 3], [2, 3], [2 * peer, 0]).Commit() for peer in range(size)]
    for turn in range(3):
        mine, got = xp.asarray(whole[2 * rank : 2 * rank + 2] + turn), xp.full((2 * size, 3), -1.0)
        device_comm.Alltoallw([mine, sends], [got, receives])
        device_comm.check()
        np.testing.assert_array_equal(got.get(), whole[:, 3 * rank : 3 * rank + 3] + turn)
    for datatype in (*sends, *receives):
        datatype.Free()


def test_neighbours(device_comm: mpicomm.Communicator, xp: Any) -> None:
    grid = device_comm.Create_cart([device_comm.size], [True])
    assert isinstance(grid, mpicomm.Communicator)
    for turn in range(3):
        sent = xp.asarray([10 * grid.rank + turn, 10 * grid.rank + turn + 5], np.int64)
        received, expected = xp.zeros(2, np.int64), np.zeros(2, np.int64)
        grid.Neighbor_alltoall(sent, received)
        grid.check()
        MPI.Cartcomm(grid).Neighbor_alltoall(sent.get(), expected)
        assert received.get().tolist() == expected.tolist()
    grid.Free()


@pytest.mark.gpu_alone  # MPI carries out this call on host arrays
def test_counts_that_differ_between_groups_are_an_error(device: str) -> None:
    with on_hosts("in turns", device, timeout_s=stretched(3.0)) as device_comm, array_module(device_comm) as xp:
        if device_comm.describe().internode == "nccl":
            pytest.skip("NCCL does not compare lengths")
        counts = [4 if device_comm.rank == 0 else 6] * device_comm.size
        send, received = xp.zeros(sum(counts), np.int32), xp.zeros(sum(counts), np.int32)
        with pytest.raises(mpicomm.MpicommError):
            device_comm.Alltoallv([send, counts], [received, counts])
            device_comm.check()
        with contextlib.suppress(mpicomm.CollectiveTimeoutError):  # ranks give up at different times
            device_comm.Free()


def test_several_domains_refuse_counts_on_the_device_on_all_ranks(device_comm: mpicomm.Communicator, xp: Any) -> None:
    x, y = xp.zeros(device_comm.size, np.float32), xp.zeros(device_comm.size, np.float32)
    counts, came = xp.ones(device_comm.size, np.int64), xp.zeros(device_comm.size, np.int64)
    if not device_comm.describe().internode:  # few ranks are one peer domain in some placements
        device_comm.Alltoallv([x, counts], [y, came])
        assert came.get().tolist() == [1] * device_comm.size
    else:
        with pytest.raises(mpicomm.InvalidUsageError, match="counts on the GPU are for the GPUs of one peer domain"):
            device_comm.Alltoallv([x, counts], [y, came])
    device_comm.Alltoallv([x, counts.get()], [y, [1] * device_comm.size])  # nothing is lost
    device_comm.check()
