"""Messages of any form of buffer, empty buffers at one address, host arrays beside device arrays, counts on GPUs.

test_random_collectives.py has more calls.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, MpicommError, PeerError
from mpicomm.collectives.gpu.decision import names_for
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs import launch_numbers
from tests.helpers.inputs.buffers import JUNK, Blocks, Placed, one_of
from tests.helpers.rigs.communicators import FORMS, communicator, complete, method_name, to_host
from tests.helpers.rigs.device_calls import on_gpus, values_of

EXAMPLES = int(os.environ.get("TEST_SEQUENCES", "60"))


# A choice that depends on time, or on the memory of one rank, would take the ranks apart.
@settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    n=st.sampled_from((0, 1, 2, 12, 17, 3000, 40_000)),
    seed=st.integers(0, 1 << 20),
    way=st.sampled_from(("Sendrecv", "Isendrecv", "two", "init")),
)
def test_messages_in_a_row_with_walls(host_comm: mpicomm.Communicator, n: int, seed: int, way: str) -> None:
    comm, rng = host_comm, np.random.default_rng([seed, host_comm.rank])
    left, right = (each if 0 <= each < comm.size else MPI.PROC_NULL for each in (comm.rank - 1, comm.rank + 1))

    def buffer(values: int) -> tuple[Blocks, Any]:
        blocks = Blocks("one", [n], np.dtype(np.int64), rng, derived=True)
        blocks.fill([np.full(n, values)], np.full(blocks.room, -1))
        blocks.placed = Placed(np, blocks.content)
        return blocks, blocks.named(rng, np, copies=values != 99, derived=True, mpis=False)

    sent, received = buffer(comm.rank), buffer(99)
    send = one_of(rng, JUNK) if right == MPI.PROC_NULL else sent[1]
    receive = one_of(rng, JUNK) if left == MPI.PROC_NULL else received[1]
    if way == "Sendrecv":
        comm.Sendrecv(send, right, 3, receive, left, 3)
    elif way == "Isendrecv":
        comm.Isendrecv(send, right, 3, receive, left, 3).Wait()
    elif way == "two":
        MPI.Request.Waitall([comm.Irecv(receive, left, 3), one_of(rng, [comm.Isend, comm.Issend])(send, right, 3)])
    else:
        requests = [comm.Recv_init(receive, left, 3), comm.Send_init(send, right, 3)]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for request in requests:
            request.Free()
    alike = bool((received[0].received(n) == (99 if left == MPI.PROC_NULL else left)).all())
    assert MPI.COMM_WORLD.allreduce(alike, MPI.LAND), f"{way} of {n}, seed {seed}"  # on all ranks, which go on alike


@pytest.mark.parametrize("name", ["Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter_block"])
@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_empty_buffers_at_one_address(host_comm: mpicomm.Communicator, name: str, form: str) -> None:
    for empty in (MPI.memory.fromaddress(0, 0), np.empty(0)):
        complete(getattr(host_comm, method_name(form, name))([empty, MPI.DOUBLE], [empty, MPI.DOUBLE]), starts=2)


@pytest.mark.parametrize("name", ["Allgather", "Allreduce", "Alltoall", "Gather", "Reduce", "Reduce_scatter_block"])
def test_host_arrays_with_every_algorithm(device: str, name: str) -> None:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("one rank has no others that pass other buffers")
    row = OPERATIONS[name]
    with on_gpus(device) as (comm, make):
        for algorithm in ("auto", *names_for(row, in_rank_order=True)):
            for count in (3, 1000, 1_000_003) if device == "cuda" else (3, 1000):
                sent = np.arange(count * (comm.size if row.send == "blocks" else 1), dtype=np.int32) + comm.rank
                got = np.zeros(count * (comm.size if row.receive == "blocks" else 1), np.int32)
                expected, at_root = got.copy(), not row.rooted or comm.rank == 0
                getattr(MPI.COMM_WORLD, name)(sent, expected if at_root else None)
                # In a rooted call the input is on the GPUs, because all ranks pass it.
                for inputs_on_gpu in (True,) if row.rooted else (True, False):
                    target = got.copy() if inputs_on_gpu else make(got)
                    source = make(sent) if inputs_on_gpu else sent
                    getattr(comm, name)(source, target if at_root else None, algorithm=algorithm)
                    comm.check()
                    assert not at_root or np.array_equal(values_of(target), expected), (algorithm, count, inputs_on_gpu)


Array = npt.NDArray[Any]
UNTOUCHED = -7.0


@pytest.fixture
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    if device == "cpu":
        pytest.skip("counts on a GPU need one")
    with communicator(device) as comm:
        yield comm


def matrix_of(rng: np.random.Generator, size: int, most: int) -> Array:
    """Return the counts of each rank's messages to each rank. Some are 0."""
    return rng.integers(0, most + 1, (size, size)) * rng.integers(0, 2, (size, size))


def values_between(source: int, target: int, count: int) -> Array:
    return (np.arange(count) + 1000 * source + 17 * target).astype(np.float32)


class DeviceCountsCase:
    """Blocks that follow each other, by ``matrix``, the counts of all ranks."""

    def __init__(self, comm: mpicomm.Communicator, matrix: Array, room: int) -> None:
        rank, ranks = comm.rank, range(comm.size)
        self.counts, self.coming = matrix[rank], matrix[:, rank]
        self.data = np.concatenate([values_between(rank, to, matrix[rank][to]) for to in ranks])
        self.expected = np.full(room, UNTOUCHED, np.float32)
        came = np.concatenate([values_between(source, rank, matrix[source][rank]) for source in ranks])
        self.expected[: len(came)] = came


def test_counts_change_between_replays_of_a_graph(comm: mpicomm.Communicator, xp: Any) -> None:
    rng, size, most = np.random.default_rng(3), comm.size, 40_000
    x, y = xp.zeros(size * most, xp.float32), xp.zeros(size * most, xp.float32)
    counts, came = xp.zeros(size, xp.int32), xp.zeros(size, xp.int32)
    stream = xp.cuda.Stream(non_blocking=True)
    comm.Alltoallv([x, counts], [y, came])
    comm.check()
    with stream:
        stream.begin_capture()
        for _ in range(2):
            y.fill(UNTOUCHED)
            comm.Alltoallv([x, counts], [y, came])
        graph = stream.end_capture()
    for turn in range(30):
        case = DeviceCountsCase(comm, matrix_of(rng, size, most if turn % 2 else 10), y.size)
        x[: len(case.data)].set(case.data, stream=stream)
        counts.set(case.counts.astype(np.int32), stream=stream)
        graph.launch(stream)
        comm.check(stream)
        stream.synchronize()
        assert came.get().tolist() == case.coming.tolist()
        assert (y.get() == case.expected).all()


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_new_arrays_in_each_call(comm: mpicomm.Communicator, xp: Any, library: str) -> None:
    """Each call has other addresses, rooms and counts, and the arrays of the calls before stay."""
    rng, size = np.random.default_rng(11), comm.size
    make: Any = xp.asarray
    if library == "torch":
        torch = pytest.importorskip("torch")
        make = partial(torch.asarray, device=torch.device("cuda", int(comm.device)))
    kept, checks = [], []
    with comm.empty(size * 3000, np.float32) as symmetric:
        for number in range(60):
            most = int(rng.choice([3, 300, 300, 3000, 90_000]))
            case = DeviceCountsCase(comm, matrix_of(rng, size, most), size * most)
            x, y = make(case.data), make(np.full(size * most, UNTOUCHED, np.float32))
            into_symmetric = number % 5 == 4 and most <= 3000
            if into_symmetric:
                y = symmetric.local[: size * most]
                y[:] = UNTOUCHED
            counts, came = make(case.counts), make(np.full(size, -1, np.int64))
            if number % 3:
                comm.Alltoallv([x, counts], [y, came])
            else:
                comm.Ialltoallv((x, counts), (y, came)).Wait()
            kept.append((x, counts))
            checks.append((case, y.copy() if into_symmetric else y, came))
        comm.check()
        for check in checks:
            _require(*check)


def _require(case: DeviceCountsCase, y: Any, came: Any) -> None:
    on_host = [array.get() if hasattr(array, "get") else array.cpu().numpy() for array in (y, came)]
    assert on_host[1].tolist() == case.coming.tolist()
    assert (on_host[0] == case.expected).all()


def test_a_new_call_in_a_capture(comm: mpicomm.Communicator, xp: Any) -> None:
    rng, size, most = np.random.default_rng(12), comm.size, 400
    stream = xp.cuda.Stream(non_blocking=True)
    buffers = []
    for _ in range(3):
        case = DeviceCountsCase(comm, matrix_of(rng, size, most), size * most)
        x, y = xp.asarray(case.data), xp.full(size * most, UNTOUCHED, xp.float32)
        buffers.append((case, x, xp.asarray(case.counts), y, xp.zeros(size, xp.int64)))
    xp.cuda.get_current_stream().synchronize()
    with stream:
        for number, (_, x, counts, y, came) in enumerate(buffers):
            if number == 1:
                stream.begin_capture()
            comm.Alltoallv([x, counts], [y, came])
        graph = stream.end_capture()
    for _ in range(3):
        graph.launch(stream)
        comm.check(stream)
    for case, _, _, y, came in buffers:
        _require(case, y, came)


def _fails(comm: mpicomm.Communicator, xp: Any, send: Any, receive: Any, error: type[MpicommError], text: str) -> None:
    """Expect an error of this call on all ranks, at the latest in ``check``."""
    with pytest.raises(error, match=text):
        comm.Alltoallv(send, receive)
        xp.cuda.get_current_stream().synchronize()
        comm.check()


def test_too_little_room_is_an_error_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    size = comm.size
    memory = xp.full(size * 10 + 100, UNTOUCHED, xp.float32)
    y = memory[: size * 10 - (comm.rank == 0)]
    x, counts, came = xp.zeros(size * 10, xp.float32), xp.full(size, 10), xp.zeros(size, xp.int64)
    text = f"recvbuf of rank 0 needs room for {size * 10} elements"
    _fails(comm, xp, [x, counts], [y, came], InvalidUsageError, text)
    assert (memory.get()[len(y) :] == UNTOUCHED).all()
    with pytest.raises(InvalidUsageError, match=text):
        comm.Alltoallv([x, counts], [y, came])


def test_negative_counts_are_an_error_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    last = comm.size - 1
    x, y = xp.zeros(comm.size, xp.float32), xp.zeros(comm.size, xp.float32)
    counts = xp.ones(comm.size, xp.int32)
    if comm.rank == last:
        counts[0] = -3
    _fails(comm, xp, [x, counts], [y, xp.zeros_like(counts)], InvalidUsageError, f"rank {last} passed a count or")


def test_counts_beyond_the_input_are_an_error_on_all_ranks(comm: mpicomm.Communicator, xp: Any) -> None:
    x, y = xp.zeros(comm.size, xp.float32), xp.zeros(3 * comm.size, xp.float32)
    counts = xp.full(comm.size, 1 + (comm.rank == 0))
    _fails(comm, xp, [x, counts], [y, xp.zeros_like(counts)], InvalidUsageError, "rank 0 passed a count or displ")


def test_counts_on_the_host_of_one_rank_are_another_call(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.size == 1:
        pytest.skip("one rank agrees with itself")
    x, y, counts = xp.zeros(comm.size, xp.float32), xp.zeros(comm.size, xp.float32), xp.ones(comm.size, xp.int64)
    sent, received = (counts, xp.zeros_like(counts)) if comm.rank else ([1] * comm.size, [1] * comm.size)
    _fails(comm, xp, [x, sent], [y, received], PeerError, "counts on the GPU")


LENGTHS = (5, 3_000_001, 5_000_003, 9_000_007, 13_000_001)  # also longer than the inboxes


def begin_after_with_old_flags(comm: Any, xp: Any, launch: int) -> None:
    """Let it be the last launch, and let the inboxes of packets with flags hold the flags of earlier launches."""
    comm.Barrier(stream=0)
    comm.check()
    arena = comm._collectives.engines.gpu.engine._arena
    layout = arena.layout
    memory = xp.cuda.UnownedMemory(arena.pointers[comm.rank], layout.nbytes, arena)
    head_and_flags = xp.ndarray((layout.sentinels,), np.uint8, xp.cuda.MemoryPointer(memory, 0))
    content = head_and_flags.get()
    launch_numbers.begin_after(launch, content, comm.size)
    inboxes = content[layout.ll :]
    inboxes[:] = launch_numbers.old_flags(inboxes.nbytes, np.random.default_rng(launch)).view(np.uint8)
    head_and_flags.set(content)
    xp.cuda.runtime.deviceSynchronize()
    MPI.COMM_WORLD.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("barriers", [0, 4])
@pytest.mark.parametrize("launch", [2**30 - 2, 2**32 - 2])
def test_old_flags_are_not_taken_for_new_when_numbers_of_launches_come_again(
    comm: mpicomm.Communicator, xp: Any, launch: int, barriers: int
) -> None:
    begin_after_with_old_flags(comm, xp, launch)
    for _ in range(barriers):
        comm.Barrier(stream=0)
    for number in range(110):
        send = xp.arange(1 + 7 * number, dtype=np.int32) + comm.rank
        receive = xp.zeros_like(send)
        comm.Allreduce(send, receive, algorithm="one_shot")
        comm.check()
        expected = comm.size * np.arange(1 + 7 * number) + sum(range(comm.size))
        assert to_host(receive).tolist() == expected.tolist()


@pytest.mark.mpi(min_size=2)
def test_messages_longer_than_the_inboxes_in_some_directions(comm: mpicomm.Communicator, xp: Any) -> None:
    rank, size = comm.rank, comm.size
    for call in range(3):
        counts = [[LENGTHS[(2 * a + b + call) % 5] for b in range(size)] for a in range(size)]  # [from][to]
        coming = [counts[source][rank] for source in range(size)]
        send = xp.concatenate(
            [xp.arange(rank + to, rank + to + counts[rank][to], dtype=np.int32) for to in range(size)]
        )
        received = xp.zeros(sum(coming), np.int32)
        comm.Alltoallv([send, counts[rank]], [received, coming])
        whole = xp.arange(sum(counts[0]), dtype=np.int32)
        part, gathered = xp.zeros(counts[0][rank], np.int32), xp.zeros_like(whole)
        comm.Reduce_scatter(whole, part, counts[0])
        comm.Allgatherv(part, [gathered, counts[0]])
        comm.check()
        expected = [np.arange(source + rank, source + rank + coming[source]) for source in range(size)]
        assert np.array_equal(to_host(received), np.concatenate(expected))
        assert np.array_equal(to_host(gathered), size * to_host(whole))
