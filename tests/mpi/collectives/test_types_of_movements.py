"""Data that is only moved is bytes, in engines and of types that MPI lacks. test_random_buffers.py has more calls."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
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
