"""Collectives on derived datatypes, the same on host and device arrays, and with operations of expressions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, Op
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.spelled_buffers import SPREADS, one_of, spread
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
