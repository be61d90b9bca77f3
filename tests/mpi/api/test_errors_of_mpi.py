"""A fault for which MPI has an error raises this error and mpicomm's, in every form of call and at every size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.rigs.call_forms import FORMS, method_name

COUNTS = (2, 1 << 18)  # MPI's, and mapped memory's if the call is a reduction

Call = tuple[str, tuple[Any, ...], dict[str, Any]]


def _faults(comm: mpicomm.Communicator, n: int) -> dict[str, tuple[int, list[Call]]]:
    """Faults by name: the class of MPI's error, and calls with the fault."""
    size = comm.size
    none: dict[str, Any] = {}
    a, b, blocks = np.ones(n), np.zeros(n), np.zeros(n * size)
    floats = [(a, b), ([a, MPI.DOUBLE], [b, MPI.DOUBLE]), (MPI.IN_PLACE, b)]
    whole, truths = np.ones(n, "D"), np.ones(n, "?")
    null = [b, n, MPI.DATATYPE_NULL]
    typed = [[blocks, [n] * size, [0] * size, [MPI.DATATYPE_NULL] * size] for _ in range(2)]
    apart = MPI.DOUBLE.Create_contiguous(2)  # not committed
    return {
        "bits of floats": (
            MPI.ERR_OP,
            [
                *((name, (*given, MPI.BAND), none) for name in ("Allreduce", "Scan", "Exscan") for given in floats),
                ("Reduce", (a, b, MPI.BOR), none),
                ("Reduce_scatter_block", (blocks, b, MPI.BXOR), none),
                ("Reduce_scatter", (blocks, b, [n] * size, MPI.LAND), none),
            ],
        ),
        "order of complex numbers": (MPI.ERR_OP, [("Allreduce", (whole, whole.copy(), MPI.MAX), none)]),
        "sum of truths": (MPI.ERR_OP, [("Allreduce", (truths, truths.copy(), MPI.SUM), none)]),
        "sum of bytes": (MPI.ERR_OP, [("Allreduce", ([a, MPI.BYTE], [b, MPI.BYTE]), none)]),
        "sum of characters": (MPI.ERR_OP, [("Allreduce", ([a, MPI.WCHAR], [b, MPI.WCHAR]), none)]),
        "average that MPI lacks": (
            MPI.ERR_OP,
            [("Allreduce", (np.ones(n, "i"), np.ones(n, "i"), mpicomm.AVG), none)],
        ),
        "no operation": (MPI.ERR_OP, [("Allreduce", (a, b, MPI.OP_NULL), none)]),
        "roots": (
            MPI.ERR_ROOT,
            [
                *((name, (a, blocks), {"root": root}) for name in ("Gather", "Gatherv") for root in (size, -1)),
                *((name, (blocks, b), {"root": root}) for name in ("Scatter", "Scatterv") for root in (size, -1)),
                *(("Bcast", (b,), {"root": root}) for root in (size, -7)),
                *(("Reduce", (a, b), {"root": root}) for root in (size, -7)),
            ],
        ),
        "null types": (
            MPI.ERR_TYPE,
            [
                ("Bcast", (null,), none),
                ("Allreduce", (null, null), none),
                ("Allgather", (null, blocks), none),
                ("Alltoallv", ([blocks, [n] * size, None, MPI.DATATYPE_NULL], blocks.copy()), none),
            ],
        ),
        "null types by rank": (MPI.ERR_TYPE, [("Alltoallw", (typed[0], typed[1]), none)]),
        "types that are not committed": (MPI.ERR_TYPE, [("Bcast", ([b, n // 2, apart],), none)]),
        "negative counts": (
            MPI.ERR_COUNT,
            [
                ("Allgatherv", (a, [blocks, [-1] * size]), none),
                ("Bcast", ([b, -1, MPI.DOUBLE],), none),
            ],
        ),
        "overlap": (MPI.ERR_BUFFER, [("Alltoall", (blocks, blocks), none), ("Allgather", (blocks[:n], blocks), none)]),
    }


FAULTS = tuple(_faults(MPI.COMM_WORLD, 2))  # type: ignore[arg-type]


@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_is_one_error(host_comm: mpicomm.Communicator, fault: str) -> None:
    for n in COUNTS:
        error_class, calls = _faults(host_comm, n)[fault]
        for operation, given, keywords in calls:
            for form in FORMS:
                method = getattr(host_comm, method_name(form, operation))
                with pytest.raises(MPI.Exception) as raised:
                    method(*given, **keywords)
                what = f"{form} {operation} of {n}: {raised.value!r}"
                assert raised.value.Get_error_class() == error_class, what
                assert isinstance(raised.value, InvalidUsageError), what


@pytest.mark.parametrize("name", ["no type", 3, np.float64, None])
def test_an_unknown_type_is_a_key_error_in_every_call(host_comm: mpicomm.Communicator, name: Any) -> None:
    for n in COUNTS:
        given, mine = [MPI.BOTTOM if name is None else np.ones(n), n, name], host_comm.rank
        calls: list[Callable[[], Any]] = [
            partial(host_comm.Bcast, given),
            partial(host_comm.Allreduce, given, given),
            partial(host_comm.Igather, given, np.ones(n * host_comm.size)),
            partial(host_comm.Send, given, mine),
            partial(host_comm.Irecv, given, mine),
            partial(host_comm.Sendrecv, given, mine, 0, given, mine),
        ]
        for call in calls:
            with pytest.raises(
                InvalidUsageError, match=r"BOTTOM as the buffer needs|no datatype|cannot map code"
            ) as raised:
                call()
            assert isinstance(raised.value, KeyError) or name is None, call
        with pytest.raises(KeyError, match="elements of type object"):
            host_comm.Bcast(np.empty(n, object))


def test_a_handler_of_the_program_is_called_once_for_each_fault(host_comm: mpicomm.Communicator) -> None:
    seen: list[int] = []
    comm = host_comm.Dup()
    handler = MPI.Comm.Create_errhandler(lambda failed, code: seen.append(MPI.Get_error_class(code)))
    comm.Set_errhandler(handler)
    for n in COUNTS:
        for op in (MPI.BAND, MPI.SUM):
            with contextlib.suppress(InvalidUsageError):  # after a handler MPI's calls may return
                comm.Reduce(np.ones(n), np.zeros(n), op, root=0 if op == MPI.BAND else comm.size)
    assert seen == [MPI.ERR_OP, MPI.ERR_ROOT] * len(COUNTS)
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    handler.Free()
    comm.Free()
