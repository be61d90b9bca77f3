"""Collectives on derived datatypes, the same on host and device arrays, and with operations of expressions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, Op
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs.buffers import Placed
from tests.helpers.rigs.call_forms import FORMS, complete, method_name
from tests.helpers.rigs.communicators import to_host
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


def test_elements_that_leave_the_array_are_refused(
    comm: mpicomm.Communicator, xp: Any, made: list[MPI.Datatype]
) -> None:
    if xp is np:
        pytest.skip("MPI looks at the arguments of host arrays")
    far, array = committed(made, MPI.DOUBLE.Create_vector(3, 1, 100)), xp.zeros(100)
    ones, nowhere = [1] * comm.size, [0] * comm.size
    with pytest.raises(InvalidUsageError, match=r"buf: 1 elements .* to byte 1608 of a buffer of 800 bytes"):
        comm.Bcast([array, 1, far])
    with pytest.raises(InvalidUsageError, match="sendbuf: 1 elements"):
        comm.Alltoallw([array, ones, nowhere, [far] * comm.size], [xp.zeros(300), ones, nowhere, [far] * comm.size])
    with pytest.raises(InvalidUsageError, match=f"{comm.size + 1} datatypes for {comm.size} ranks"):
        comm.Alltoallw(*[[array, ones, nowhere, [far] * (comm.size + 1)]] * 2)
    with pytest.raises(TypeError, match="None is no datatype"):
        comm.Alltoallw(*[[array, ones, nowhere, [None] * comm.size]] * 2)


def test_in_a_graph(comm: mpicomm.Communicator, xp: Any, made: list[MPI.Datatype]) -> None:
    if xp is np:
        pytest.skip("graphs are a GPU's")
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
        [committed(made, MPI.INT32_T.Create_hindexed([3], [address_of(array)])) for array in arrays]
        for arrays in (sent, received)
    ]
    counts = [1] * comm.size, [0] * comm.size
    request = getattr(comm, method)([MPI.BOTTOM, counts, types[0]], [MPI.BOTTOM, counts, types[1]])
    if request is not None:
        request.Wait()
    for peer, array in enumerate(received):
        assert (to_host(array) == 10 * peer + comm.rank).all()


def address_of(array: Any) -> int:
    address: int = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return address


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_plain_arrays_of_types_that_mpi_lacks(comm: mpicomm.Communicator, xp: Any, dtype: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    element = np.dtype(getattr(ml_dtypes, dtype, np.float16))
    around = range(comm.size)
    graph = comm.Create_dist_graph_adjacent(around, around)
    for algorithm, form in itertools.product(("auto", "mpi"), FORMS):
        send = Placed(xp, (np.arange(3 * comm.size) % 5 + comm.rank).astype(element))
        receive = Placed(xp, np.zeros(3 * comm.size, element))
        calls: list[tuple[Any, str]]
        calls = [(comm, "Alltoall"), (graph, "Neighbor_alltoall"), (graph, "Neighbor_alltoallv")]
        for each, name in calls:
            method = getattr(each, method_name(form, name))
            complete(method(send.array, receive.array, algorithm=algorithm))
            each.check()
            expected = [(3 * comm.rank + i) % 5 + rank for rank in around for i in range(3)]
            assert receive.get().astype(float).tolist() == expected, (name, algorithm, form)
    graph.Free()


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
UNITS = 6  # the elements of each of the datatypes below


def one_of(rng: np.random.Generator, choices: Sequence[Any]) -> Any:
    return choices[int(rng.integers(len(choices)))]


def leave_together() -> None:
    """Wait until all ranks have left a call of MPI.

    MPI moves data only inside its calls. So a rank may be in the call for as long as another one waits for a GPU, which
    in turn waits for the rank.
    """
    MPI.COMM_WORLD.Barrier()


def datatypes_of_units(made: list[MPI.Datatype]) -> list[MPI.Datatype]:
    """Datatypes of as many doubles: without gaps, with gaps, in several regions, and one that kernels have to pack."""
    double = MPI.DOUBLE
    structure = MPI.Datatype.Create_struct([1, 2], [8, 24], [double, double])
    kinds = [
        double.Create_contiguous(UNITS),
        double.Create_vector(UNITS, 1, 3),
        double.Create_subarray([4, 5], [2, 3], [1, 2]),
        double.Create_indexed([1, 3, 2], [1, 4, 12]),
        double.Create_hindexed_block(1, [120, 64, 8, 24, 96, 0]),
        structure.Create_resized(0, 48).Create_contiguous(2),
    ]
    made += [structure, *kinds]
    extents = [8 * UNITS, *[160] * 5]
    return [committed(made, each.Create_resized(0, extent)) for each, extent in zip(kinds, extents, strict=True)]


@pytest.mark.parametrize("name", [row.name for row in OPERATIONS.values() if not row.reduces and not row.of_neighbors])
@pytest.mark.parametrize("in_place", [False, True])
def test_results_are_those_of_mpi(device: str, made: list[MPI.Datatype], name: str, in_place: bool) -> None:
    """Each rank draws its datatypes, so ranks with gaps meet ranks without."""
    row, rank, size = OPERATIONS[name], MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    if in_place and (row.rooted or (row.send != row.receive and row.send != "one")):
        pytest.skip("MPI has no such call in place")
    shared, own, kinds = np.random.default_rng(size), np.random.default_rng([size, rank]), datatypes_of_units(made)

    def argument(shape: str, same: int, of_rank: list[int], of_peers: list[int], most: int) -> list[Any]:
        """An argument but for its array, in which a block has at most ``most`` elements of a datatype."""
        if shape == "one":
            return [same if row.counts == "same" else of_rank[rank], one_of(own, kinds)]
        if shape == "blocks":
            return [same, one_of(own, kinds)]
        counts = of_rank if "one" in (row.send, row.receive) else of_peers
        if shape == "vector":
            return [counts, [most * peer for peer in range(size)], one_of(own, kinds)]
        return [counts, [160 * most * peer + 8 for peer in range(size)], [one_of(own, kinds) for _ in counts]]

    with on_gpus(device, timeout_s=COMPILE_S) as (comm, make):
        for number, root in enumerate((*range(size), *[0] * 12)):
            most, form = one_of(shared, (3, 300)), FORMS[number % len(FORMS)]
            same, of_rank = int(shared.integers(most)), shared.integers(0, most, size).tolist()
            table = shared.integers(0, most, (size, size))
            table = np.minimum(table, table.T) if in_place else table
            shapes = (row.send, table[rank].tolist()), (row.receive, table[:, rank].tolist())
            arguments = [argument(shape, same, of_rank, of_peers, most) for shape, of_peers in shapes]
            contents = [own.random(20 * most * (size + 1)) for _ in arguments]
            outcomes = []
            for each, where, method in (
                (MPI.Intracomm(MPI.COMM_WORLD), np.array, name),
                (comm, make, method_name(form, name)),
            ):
                send, receive = map(where, contents)
                given: list[Any] = [[send, *arguments[0]], [receive, *arguments[1]]]
                if in_place:
                    given[0] = MPI.IN_PLACE
                if row.rooted:
                    if rank != root and row.rooted != "bcast":
                        given[row.rooted == "receive"] = None
                    given.append(root)
                complete(getattr(each, method)(*given[row.rooted == "bcast" :]))
                if each is not comm:
                    leave_together()
                outcomes.append(values_of(receive))
            np.testing.assert_array_equal(outcomes[1], outcomes[0], f"{form}: {arguments}")


def test_blocks_with_gaps_of_neighbours_that_occur_twice(device: str, made: list[MPI.Datatype]) -> None:
    """In a ring of two ranks each is twice the other's neighbour, and in the other dimension its own."""
    rank, size, kinds = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, datatypes_of_units(made)
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
                if each is not comm:
                    leave_together()
                outcomes.append(values_of(arrays[1]))
            np.testing.assert_array_equal(outcomes[1], outcomes[0])
    of_mpi.Free()


@pytest.mark.parametrize(
    "name", ["Allgather", "Allgatherv", "Alltoall", "Alltoallv", "Bcast", "Gather", "Gatherv", "Scatter"]
)
def test_one_rank_with_a_derived_datatype_meets_plain_arrays(host_comm: mpicomm.Communicator, name: str) -> None:
    """With algorithm= no rank waits inside MPI for a rank in mapped memory."""
    row, rank, size = OPERATIONS[name], host_comm.rank, host_comm.size
    pair = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()  # two doubles with a gap between them
    spread = pair.Create_resized(0, 32).Commit()
    is_derived, root = rank == size - 1, 0
    blocks: dict[str, int] = {shape: size if shape in ("blocks", "vector") else 1 for shape in (row.send, row.receive)}

    def argument(array: Any, shape: str) -> tuple[Any, Any]:
        """Return memory and the argument: the same content, with gaps on one rank."""
        each = blocks[shape]
        if not is_derived:
            return array, [array, [2] * each] if shape == "vector" else array
        memory = np.full((each, 4), -7.0)
        memory[:, :3:2] = array.reshape(each, 2)
        return memory, [memory, [1] * each, [*range(each)], spread] if shape == "vector" else [memory, 1, spread]

    for form in row.methods:
        sent = np.arange(2.0 * blocks[row.send]) + 100 * rank
        got = np.full(2 * blocks[row.receive], -1.0)
        send, receive = argument(sent, row.send)[1], argument(got, row.receive)
        memory = receive[0]
        if row.rooted == "bcast":
            memory[...] = memory if rank else np.where(memory == -7, -7, 5.0)
        given = [receive[1]] if row.rooted == "bcast" else [send, receive[1]]
        complete(getattr(host_comm, form)(*given, **({"root": root} if row.rooted else {}), algorithm="one_shot"))
        if row.rooted == "receive" and rank != root:
            continue
        values = memory[:, :3:2].ravel() if is_derived else memory
        peers = range(size)
        expected = {
            "bcast": [5.0, 5.0],
            "send": [2.0 * rank, 2.0 * rank + 1],
            "receive": [100.0 * peer + i for peer in peers for i in (0, 1)],
        }.get(row.rooted) or [
            100.0 * peer + i + (2 * rank if row.send in ("blocks", "vector") else 0) for peer in peers for i in (0, 1)
        ]
        assert values.tolist() == expected, (form, values)
        assert not is_derived or (memory[:, 1::2] == -7).all()
    spread.Free()
    pair.Free()


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
    with pytest.raises(InvalidUsageError, match=r'algorithm="ring" of Allreduce: .* does not commute: use "two_shot"'):
        comm.Allreduce(send, result, Op("a - b"), algorithm="ring")
    comm.Allreduce(send, result, Op("max(abs(a), abs(b))", commute=True), algorithm="ring")
    comm.check()
    expected = np.abs(np.stack([part_of(rank) for rank in range(comm.size)])).max(axis=0)
    # On one rank the only contribution is the result, as in MPI.
    assert (result == xp.asarray(expected if comm.size > 1 else part_of(0))).all()


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
