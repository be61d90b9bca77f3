"""Collectives on derived datatypes, with operations of expressions, and with requests, which keep their buffers."""

from __future__ import annotations

import itertools
import operator
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, Op, PeerError
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.requests import ProgressThread
from mpicomm.waiting import wait_until
from tests.helpers.inputs.buffers import SPREADS, Placed, one_of, spread, values
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, REDUCTIONS, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator, to_host
from tests.helpers.rigs.device_calls import on_gpus, values_of


@pytest.fixture
def made() -> Iterator[list[MPI.Datatype]]:
    """Datatypes that the test has made; they are freed after it."""
    datatypes: list[MPI.Datatype] = []
    yield datatypes
    for datatype in datatypes:
        datatype.Free()


def committed(made: list[MPI.Datatype], datatype: MPI.Datatype) -> MPI.Datatype:
    made.append(datatype)
    return datatype.Commit()


def test_structures_meet_lists(comm: mpicomm.Communicator, xp: Any, made: list[MPI.Datatype]) -> None:
    """The root has an array of structures, the other ranks have the fields at irregular places; each byte is right."""
    count = 3000
    structure = MPI.Datatype.Create_struct([1, 1, 3], [0, 12, 20], [MPI.DOUBLE, MPI.INT32_T, MPI.INT16_T])
    made.append(structure)
    element = committed(made, structure.Create_resized(0, 32))
    order = np.random.default_rng(3).permutation(count)
    listed = committed(made, structure.Create_hindexed_block(1, (40 * order).tolist()))
    taken = np.r_[0:8, 12:16, 20:26]
    for repeat in range(2):
        for root in range(comm.size):
            sent = np.random.default_rng([root, repeat]).integers(0, 256, (count, 32)).astype(np.uint8)
            if comm.rank == root:
                array = xp.asarray(sent)
                comm.Bcast([array, count, element], root)
                np.testing.assert_array_equal(to_host(array), sent)
            else:
                array = xp.full((count, 40), 7, np.uint8)
                comm.Bcast([array, 1, listed], root)
                expected = np.full((count, 40), 7, np.uint8)
                expected[order[:, None], taken] = sent[:, taken]
                np.testing.assert_array_equal(to_host(array), expected)


@pytest.mark.gpu_alone  # graphs are a GPU's
def test_in_a_graph(comm: mpicomm.Communicator, xp: Any, made: list[MPI.Datatype]) -> None:
    odd = committed(made, MPI.INT64_T.Create_vector(1000, 1, 2))
    array = xp.zeros(2000, np.int64)
    stream = xp.cuda.Stream(non_blocking=True)
    with stream:
        comm.Bcast([array, 1, odd])
        stream.synchronize()
        stream.begin_capture()
        comm.Bcast([array, 1, odd])
        graph = stream.end_capture()
        for repeat in range(1, 4):
            array[:] = repeat * (comm.rank == 0)
            graph.launch(stream)
            comm.check(stream)
            expected = np.where(np.arange(2000) % 2 == 0, repeat, repeat * (comm.rank == 0))
            np.testing.assert_array_equal(to_host(array), expected)


@pytest.mark.parametrize("method", ["Alltoallw", "Ialltoallw"])
def test_absolute_addresses(comm: mpicomm.Communicator, xp: Any, made: list[MPI.Datatype], method: str) -> None:
    sent = [xp.full(3, 10 * comm.rank + peer, np.int32) for peer in range(comm.size)]
    received = [xp.zeros(3, np.int32) for _ in range(comm.size)]
    types = [
        [committed(made, MPI.INT32_T.Create_hindexed([3], [MPI.Get_address(array)])) for array in arrays]
        for arrays in (sent, received)
    ]
    counts = [1] * comm.size, [0] * comm.size
    request = getattr(comm, method)([MPI.BOTTOM, counts, types[0]], [MPI.BOTTOM, counts, types[1]])
    if request is not None:
        request.Wait()
    for peer, array in enumerate(received):
        assert (to_host(array) == 10 * peer + comm.rank).all()


@pytest.mark.parametrize("count", [3, 1 << 20])
@pytest.mark.parametrize("op", ["SUM", "MAX", "BXOR", "LAND"])
def test_sums_of_characters_are_mpis(comm: mpicomm.Communicator, xp: Any, count: int, op: str) -> None:
    plain, content = MPI.Intracomm(MPI.COMM_WORLD), (np.arange(count) % 11 + comm.rank).astype(np.int8)
    for datatype in (MPI.CHAR, MPI.CHARACTER, MPI.WCHAR):
        if datatype == MPI.DATATYPE_NULL:
            continue
        n = content.nbytes // datatype.Get_size()
        outcomes = []
        for each, module in ((plain, np), (comm, xp)):
            send, receive = Placed(module, content), Placed(module, np.zeros_like(content))
            try:
                each.Allreduce([send.array, n, datatype], [receive.array, n, datatype], getattr(MPI, op))
                outcomes.append(receive.get().tolist())
            except MPI.Exception as error:
                outcomes.append(error.Get_error_class())
        assert outcomes[0] == outcomes[1], datatype.name


COMPILE_S = 20.0  # a rank may compile a kernel while others, which need other kernels, wait for it on their GPUs


def test_blocks_with_gaps_of_neighbours_that_occur_twice(device: str) -> None:
    """In a ring of two ranks each is twice the other's neighbour, and in the other dimension its own."""
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    kinds = [spread(np.dtype(np.float64), kind) for kind in range(SPREADS)]
    own, counts, starts = np.random.default_rng([size, rank]), [1, 1, 2, 2], [8, 488, 968, 1448]

    def torus(comm: Any) -> Any:
        return comm.Create_cart([size, 1], periods=[True, True])

    of_mpi = torus(MPI.Intracomm(MPI.COMM_WORLD))
    with on_gpus(device, torus, COMPILE_S) as (comm, make):
        for _ in range(12):
            contents = [own.random(300) for _ in range(2)]
            types = [[one_of(own, kinds) for _ in counts] for _ in range(2)]
            outcomes = []
            for each, where in ((of_mpi, np.array), (comm, make)):
                arrays = [*map(where, contents)]
                each.Neighbor_alltoallw(*([array, counts, starts, of] for array, of in zip(arrays, types, strict=True)))
                # MPI moves data only inside its calls. So a rank may be in the call for as long as another one waits
                # for a GPU, which in turn waits for the rank.
                if each is not comm:
                    MPI.COMM_WORLD.Barrier()
                outcomes.append(values_of(arrays[1]))
            np.testing.assert_array_equal(outcomes[1], outcomes[0])
    of_mpi.Free()


COUNT = 1001
LARGER = "a if abs(a) > abs(b) else b"  # associative, and of numbers that differ commutative


def part_of(rank: int) -> Any:
    return np.random.default_rng(rank).permutation(COUNT).astype(np.int32) - COUNT // 2


def larger(parts: list[Any]) -> Any:
    result = parts[0]
    for other in parts[1:]:
        result = np.where(np.abs(result) > np.abs(other), result, other)
    return result


def test_mpi_carries_it_out(comm: mpicomm.Communicator, xp: Any) -> None:
    expected = larger([part_of(rank) for rank in range(comm.size)])
    op = Op(LARGER)
    result = np.empty(COUNT, np.int32)
    MPI.COMM_WORLD.Allreduce(part_of(comm.rank), result, op)
    assert (result == expected).all()
    staged = xp.zeros(COUNT, xp.int32)
    comm.Allreduce(xp.asarray(part_of(comm.rank)), staged, op, algorithm="mpi")
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
    send, result = xp.asarray(part_of(comm.rank)), xp.zeros(COUNT, xp.int32)
    comm.Allreduce(send, result, Op("max(abs(a), abs(b))", commute=True), algorithm="ring")
    comm.check()
    expected = np.abs(np.stack([part_of(rank) for rank in range(comm.size)])).max(axis=0)
    # On one rank the only contribution is the result, as in MPI.
    assert (result == xp.asarray(expected if comm.size > 1 else part_of(0))).all()


FLOAT32 = np.dtype(np.float32)


def calls_of_every_kind() -> list[Case]:
    half = dtype_or_skip("float16")
    cases = [Case(name, half, 9, in_place=place) for name in OF_ONE_TYPE for place in (False, name != "Bcast")]
    options: list[dict[str, Any]] = [{"op": "avg"}, {"op": "a * 2 - b"}, {"algorithm": "one_shot"}]
    cases += [Case(name, FLOAT32, 9, **option) for name in REDUCTIONS for option in options]
    cases += [Case(row.name, FLOAT32, 9, wire="int8") for row in OPERATIONS.values() if row.quantizable]
    cases += [Case("Alltoall", FLOAT32, 9, algorithm="one_shot", in_place=place) for place in (False, True)]
    # Without recvcounts, which a case passes only in place, the ranks exchange counts first, as in mpi4py.
    return [case for case in cases if case.operation != "Reduce_scatter" or case.in_place]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["start", "prepare"])
def test_a_start_waits_for_no_rank(comm: mpicomm.Communicator, xp: Any, method: str) -> None:
    """The other ranks start only after rank 0 has told them that it has started."""
    plain = MPI.Intracomm(MPI.COMM_WORLD)
    waits = []
    for case in calls_of_every_kind():
        prepared = Prepared(case, comm.rank, comm.size, xp)
        if comm.device != "cpu":
            prepared.run(comm)  # the first call of a kind on GPUs sets up memory, for which ranks meet
            prepared.renew(case.seed)
        request = prepared.prepare(comm) if method == "prepare" else None
        if comm.rank and not wait_until(lambda: plain.iprobe(0, 7), 20):
            waits.append(case)
        if request is not None:
            request.Start()
        running = request or prepared.start(comm)
        if comm.rank:
            plain.recv(source=0, tag=7)
        for rank in range(1, comm.size if comm.rank == 0 else 1):
            plain.send(None, rank, 7)
        running.Wait()
        prepared.check()
        if request is not None:
            request.Free()
    assert not waits


@pytest.mark.mpi(min_size=2)
def test_nonblocking_calls_that_differ_are_told(host_comm: mpicomm.Communicator) -> None:
    half = np.ones(5, np.float16)
    request = host_comm.Iallreduce(half, half.copy(), MPI.MAX if host_comm.rank else MPI.SUM)
    with pytest.raises(PeerError, match=r"rank 0: Allreduce\(float16, count=5, op=sum\); rank 1: .*op=max"):
        request.Wait()


def test_buffers_that_the_caller_drops_live_until_the_call_is_over(
    comm: mpicomm.Communicator, xp: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProgressThread, "add", lambda self, work, prepare_thread: work)  # only `Wait` completes it
    buffers = [Placed(xp, np.ones(3, np.float16)).array for _ in range(2)]
    for _ in range(2):  # the second time it may be known
        request: Any = comm.Iallreduce(*buffers)
        kept = request.kept
        if request.over:  # as on the host, because a call is over there when it returns
            assert kept is None
        else:
            assert kept[0] is buffers[0] and kept[1] is buffers[1]
        request.Wait()
        assert request.kept is None


def test_a_started_collective_goes_on_while_its_ranks_are_in_one_on_mapped_memory(device: str) -> None:
    """Half of the ranks wait for the first call before they come to the second, which the others have begun."""
    with communicator(device, timeout_s=stretched(3.0)) as comm, comm.Dup() as other, array_module(comm) as xp:
        for number in range(5):
            first, second = (
                Prepared(
                    Case("Allreduce", FLOAT32, 300_001, algorithm=algorithm, seed=number), comm.rank, comm.size, xp
                )
                for algorithm in ("auto", "one_shot")
            )
            request = first.start(other)
            if comm.rank % 2 == 0:
                request.Wait()
            second.run(comm)
            request.Wait()
            comm.check()
            first.check()
            second.check()


def test_an_in_place_reduce_scatter_keeps_its_copy_of_the_input(comm: mpicomm.Communicator, xp: Any) -> None:
    """MPI gets a copy of the input, and reads it until the request is complete."""
    count = 262_145
    parts = [values(np.dtype(np.int32), count * comm.size, rank) for rank in range(comm.size)]
    for _ in range(10):
        buffer = Placed(xp, parts[comm.rank].copy())
        request = comm.Ireduce_scatter(MPI.IN_PLACE, buffer.array, [count] * comm.size, op=MPI.MAX)
        others = [np.full(count * comm.size, -1, np.int32) for _ in range(4)]  # they take the place of freed memory
        request.Wait()
        expected = np.max(parts, axis=0)[comm.rank * count : (comm.rank + 1) * count]
        assert buffer.get()[:count].tobytes() == expected.tobytes()
        assert others


MESSAGES = ("Isend", "Issend", "Irsend", "Ibsend", "Isendrecv", "Isendrecv_replace")


@pytest.fixture
def graph(host_comm: mpicomm.Communicator) -> Iterator[Any]:
    """A communicator of the host with neighbours."""
    graph = host_comm.Create_dist_graph_adjacent(range(host_comm.size), range(host_comm.size))
    yield graph
    graph.Free()


def references(arrays: list[Any]) -> list[int]:
    """Return how many references there are to each array."""
    return list(map(sys.getrefcount, arrays))


def test_a_request_of_a_collective_keeps_its_buffers(graph: Any) -> None:
    for row, way in itertools.product(OPERATIONS.values(), ("start", "prepare")):
        prepared = Prepared(Case(row.name, np.dtype(np.float64), 5), graph.rank, graph.size, np)
        given = [each for each in prepared.arguments() if each is not None]
        arrays = [each[0] if isinstance(each, list) else each for each in given]
        free = references(arrays)
        request = getattr(prepared, way)(graph)
        assert all(map(operator.gt, references(arrays), free)), (way, row.name)
        if way == "prepare":
            request.Start()
            request.Wait()
            assert all(map(operator.gt, references(arrays), free)), (way, row.name)
            request.Free()
            del request
        else:
            request.Wait()
        assert references(arrays) == free, (way, row.name)


def test_a_request_of_a_message_keeps_its_buffers(graph: Any) -> None:
    me = graph.rank
    MPI.Attach_buffer(np.empty(1 << 12, np.uint8))
    for name in MESSAGES:
        send, receive = arrays = [np.ones(5), np.zeros(5)]
        free = references(arrays)
        if name == "Isendrecv":
            requests = [graph.Isendrecv(send, me, 0, receive, me)]
        elif name == "Isendrecv_replace":
            requests = [graph.Isendrecv_replace(receive, me, source=me)]
        else:
            requests = [graph.Irecv(receive, me), getattr(graph, name)(send, me)]
        held = references(arrays)
        assert held[1] > free[1] and (held[0] > free[0] or name.endswith("replace")), name
        MPI.Request.Waitall(requests)
        del requests
        assert references(arrays) == free, name
    MPI.Detach_buffer()
