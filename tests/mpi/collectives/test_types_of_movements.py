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
