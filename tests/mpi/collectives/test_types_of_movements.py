"""Data that is only moved is bytes, in engines and of types that MPI lacks. test_random_buffers.py has more calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS
from tests.helpers.inputs.buffers import Placed
from tests.helpers.rigs.call_forms import FORMS, complete, method_name

UNIT = 16  # bytes, a multiple of each type
TYPES: list[tuple[Any, int]] = [
    (MPI.BYTE, 1), (MPI.SIGNED_CHAR, 1), (MPI.DOUBLE, 8), ("bfloat16", 2), (MPI.CHAR, 1), (MPI.UNSIGNED_SHORT, 2),
    (MPI.C_DOUBLE_COMPLEX, 16), ("float8_e5m2", 1), (MPI.INT64_T, 8), ("f", 4), (MPI.AINT, 8), (MPI.C_BOOL, 1),
]  # fmt: skip


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_each_rank_may_name_the_data_by_another_type(comm: mpicomm.Communicator, xp: Any, algorithm: str) -> None:
    pytest.importorskip("ml_dtypes")
    for turn, units in itertools.product(range(len(TYPES)), (1, 777)):
        root = turn % comm.size
        content = np.random.default_rng(turn).integers(0, 256, UNIT * units, np.uint8)
        buffer = Placed(xp, content if comm.rank == root else np.zeros_like(content))
        datatype, itemsize = TYPES[(turn + comm.rank) % len(TYPES)]
        comm.Bcast([buffer.array, units * UNIT // itemsize, datatype], root, algorithm=algorithm)
        comm.check()
        assert (buffer.get() == content).all(), datatype


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


def test_what_only_the_root_names_otherwise(comm: mpicomm.Communicator, xp: Any) -> None:
    """No rank waits for a root that refuses."""
    for units, name in itertools.product((1, 70_000), ("Gather", "Gatherv")):
        mine = Placed(xp, np.full(8 * units, comm.rank, np.uint8))
        joined = Placed(xp, np.zeros(8 * units * comm.size, np.uint8))
        whole = joined.array if name == "Gather" else [joined.array, 8 * units]
        getattr(comm, name)([mine.array, units, MPI.DOUBLE], whole if comm.rank == 0 else None)
        comm.check()
        if comm.rank == 0:
            assert (joined.get().reshape(comm.size, -1) == np.arange(comm.size)[:, None]).all()


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
