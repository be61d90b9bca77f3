"""A fault is one error, MPI's and mpicomm's, in every form of call and at every size.

MPI looks at the arguments of small host calls.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.activity.reading import read_activity
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.errors import BufferRefusedError
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, Case, Prepared
from tests.helpers.rigs.communicators import FORMS, method_name

LARGE = 1 << 18  # elements: mapped memory if the call is a reduction, else MPI's as of a few


READ_ONLY = r"buf is a .* that is read-only"


def test_read_only_memory_is_the_same_error_in_every_call_at_every_size(host_comm: mpicomm.Communicator) -> None:
    rank, size = host_comm.rank, host_comm.size
    graph = host_comm.Create_dist_graph_adjacent(range(size), range(size))  # it has as many neighbours as ranks
    for count, (name, row) in itertools.product((1, LARGE), OPERATIONS.items()):
        if size == 1 and row.rooted == "bcast":
            continue  # the root only reads its buffer
        for algorithm in ("auto", "one_shot") if name in OF_ONE_TYPE else ("auto",):
            root = (rank + (row.rooted != "receive")) % size  # a rank that receives
            case = Case(
                name, np.dtype(np.float64), count, root=root, algorithm=algorithm, in_place=row.send == "by_recvcounts"
            )
            prepared = Prepared(case, rank, size, np)
            array = prepared.arguments()[1]
            (array[0] if isinstance(array, list) else array).flags.writeable = False
            for call in (prepared.run, prepared.start, prepared.prepare)[: 3 if algorithm == "auto" else 1]:
                with pytest.raises(BufferRefusedError, match=READ_ONLY):
                    call(graph if row.of_neighbors else host_comm)
    buffer = np.ones(3)
    buffer.flags.writeable = rank > 0  # the root only reads it
    host_comm.Bcast(buffer, algorithm="one_shot")
    graph.Free()


def test_a_refused_call_is_no_call_of_mpi(host_comm: mpicomm.Communicator) -> None:
    def made() -> int:
        found = read_activity(os.getpid())
        assert found is not None
        return sum(calls.by_mpi for calls in found.communicators)

    host_comm.Barrier()
    before = made()
    for call in (host_comm.Allreduce, host_comm.Allgather, host_comm.Iallreduce, host_comm.Igather):
        with pytest.raises(BufferRefusedError):
            call(np.zeros((2, 4))[:, ::2], np.zeros(4 * host_comm.size))
    assert made() == before
    host_comm.Barrier()
    assert made() == before + 1


def _messages(comm: mpicomm.Communicator, send: Any, receive: Any) -> dict[str, Callable[[], Any]]:
    me = MPI.COMM_WORLD.rank  # a freed communicator has no rank
    return {
        **{name: partial(getattr(comm, name), send, me) for name in ("Send", "Isend", "Send_init")},
        **{name: partial(getattr(comm, name), receive, me) for name in ("Recv", "Irecv", "Recv_init")},
        **{name: partial(getattr(comm, name), send, me, 0, receive, me) for name in ("Sendrecv", "Isendrecv")},
        "Sendrecv_replace": lambda: comm.Sendrecv_replace(receive, me, source=me),
        "Isendrecv_replace": lambda: comm.Isendrecv_replace(receive, me, source=me),
    }


def _calls(comm: mpicomm.Communicator, send: Any, receive: Any) -> list[Callable[[], Any]]:
    return [
        *(partial(getattr(comm, name), send, receive) for name in ("Allreduce", "Alltoall", "Reduce", "Scan")),
        *_messages(comm, send, receive).values(),
        lambda: comm.Bcast(receive),
        lambda: comm.Iallreduce(send, receive),
        lambda: comm.Allreduce_init(send, receive),
    ]


def _calls_without_buffers(comm: mpicomm.Communicator) -> list[Callable[[], Any]]:
    return [lambda: comm.bcast(3), lambda: comm.size, comm.Barrier, comm.Dup, comm.Split, comm.describe, comm.Probe]


def test_read_only_memory_is_the_same_error_in_messages(host_comm: mpicomm.Communicator) -> None:
    for count in (1, LARGE):
        receive = np.zeros(count)
        receive.flags.writeable = False
        for name, call in _messages(host_comm, np.ones(count), receive).items():
            if name not in ("Send", "Isend", "Send_init"):
                with pytest.raises(BufferRefusedError, match=READ_ONLY):
                    call()


def test_a_missing_buffer_is_a_type_error_in_every_call(host_comm: mpicomm.Communicator) -> None:
    for name, operation in OPERATIONS.items():
        if operation.of_neighbors:
            continue
        given = [None] if operation.rooted == "bcast" else [None, None]
        keywords: dict[str, Any] = {"root": host_comm.rank} if operation.rooted else {}
        if operation.send == "by_recvcounts":
            keywords["recvcounts"] = [1] * host_comm.size
        for form in operation.methods:
            with pytest.raises(TypeError, match=f"{name}: (sendbuf|recvbuf|buf) is None: pass a"):
                getattr(host_comm, form)(*given, **keywords)


FITTING = {"Allgather": 1, "Allgatherv": 1, "Gather": 1, "Gatherv": 1, "Scatter": 0, "Scatterv": 0}
"""Collectives that only move data, with the buffer that has a block for each rank."""


@pytest.mark.parametrize("name", ["Alltoall", "Alltoallv", *FITTING])
def test_buffers_of_different_lengths_are_refused_at_every_size(host_comm: mpicomm.Communicator, name: str) -> None:
    size, operation = host_comm.size, OPERATIONS[name]
    keywords: dict[str, Any] = {"root": host_comm.rank} if operation.rooted else {}
    for count, form, more in itertools.product((4, LARGE), operation.methods, (-1, 1)):
        lengths = [count * size] * 2
        if name in FITTING:
            lengths[1 - FITTING[name]] = count
        lengths[1] += more * (lengths[1] // count)
        send, receive = (np.zeros(length, np.float32) for length in lengths)
        types = (None, MPI.FLOAT) if operation.receive != "vector" and operation.send != "vector" else (None,)
        for datatype in types:
            given = [send, receive] if datatype is None else [[send, datatype], [receive, datatype]]
            with pytest.raises(InvalidUsageError, match=f"{name}: sendbuf holds .* but recvbuf has room for"):
                getattr(host_comm, form)(*given, **keywords)


def test_a_named_algorithm_takes_what_only_mpi_can_carry_out(host_comm: mpicomm.Communicator) -> None:
    rank, size = host_comm.rank, host_comm.size
    apart = MPI.INT.Create_vector(2, 1, 2).Commit()
    for count, algorithm in itertools.product((1, LARGE // 4), ("auto", "one_shot")):
        how: dict[str, Any] = {"algorithm": algorithm}
        pairs = np.zeros(count, np.dtype([("value", "f8"), ("rank", "i4")], align=True))
        pairs["value"], pairs["rank"] = 7, rank
        found: Any = np.zeros_like(pairs)
        host_comm.Allreduce([pairs, count, MPI.DOUBLE_INT], [found, count, MPI.DOUBLE_INT], MPI.MAXLOC, **how)
        assert (found["rank"] == 0).all()
        host_comm.Iallreduce([pairs, count, MPI.DOUBLE_INT], [found, count, MPI.DOUBLE_INT], MPI.MINLOC, **how).Wait()
        assert (found["rank"] == 0).all()
        masks, joined = np.full(count, 1 << rank, np.uint8), np.zeros(count, np.uint8)
        host_comm.Allreduce([masks, MPI.BYTE], [joined, MPI.BYTE], MPI.BXOR, **how)
        assert (joined == (1 << size) - 1).all()
        every, gathered = np.arange(4, dtype=np.int32) + 10 * rank, np.zeros(2 * size, np.int32)
        host_comm.Allgather([every, 1, apart], [gathered, 2, MPI.INT], **how)
        assert gathered.tolist() == [10 * peer + n for peer in range(size) for n in (0, 2)]
    apart.Free()


def test_alltoallw_on_the_host_is_only_for_mpi(host_comm: mpicomm.Communicator) -> None:
    given: list[Any] = [
        np.zeros(host_comm.size),
        [1] * host_comm.size,
        [0] * host_comm.size,
        [MPI.DOUBLE] * host_comm.size,
    ]
    for form in OPERATIONS["Alltoallw"].methods:
        with pytest.raises(InvalidUsageError, match=r"of Alltoallw is for device arrays, .*: leave algorithm= out"):
            getattr(host_comm, form)(given, [given[0].copy(), *given[1:]], algorithm="one_shot")


@pytest.mark.parametrize("end", ["Free", "free", "Disconnect"])
def test_every_call_of_a_freed_communicator_is_the_same_error(end: str) -> None:
    comm = mpicomm.Communicator(device="cpu")
    getattr(comm, end)()
    for count in (1, LARGE):
        for each in (*_calls(comm, np.ones(count), np.zeros(count)), *_calls_without_buffers(comm)):
            with pytest.raises(InvalidUsageError, match="the communicator was freed; create another") as raised:
                each()
            assert isinstance(raised.value, MPI.Exception)  # programs may expect MPI's error
            assert raised.value.Get_error_class() == MPI.ERR_COMM


def test_memory_that_mpi_has_no_type_for_or_cannot_read_is_the_same_error_in_every_call(
    host_comm: mpicomm.Communicator,
) -> None:
    for count in (4, LARGE):
        objects, gaps = np.empty(count, object), np.zeros((2, count))[:, ::2]
        for bad, text in (
            (objects, r"buf has elements of type object, .*: convert it, or move it"),
            (gaps, "is neither C- nor Fortran-contiguous"),
        ):
            for each in _calls(host_comm, bad, bad):
                with pytest.raises(BufferRefusedError, match=text):
                    each()
        with pytest.raises(BufferRefusedError, match="is neither C- nor Fortran-contiguous"):
            host_comm.Allreduce(np.zeros(count), gaps)


def test_a_type_that_only_mpi_knows_has_no_average(host_comm: mpicomm.Communicator) -> None:
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for call in (host_comm.Allreduce, host_comm.Iallreduce):
        with pytest.raises(
            InvalidUsageError, match="MPI, which carries out calls of this element type, has no AVG: use"
        ):
            call([np.ones(4), 1, pairs], [np.ones(4), 1, pairs], mpicomm.AVG)
    pairs.Free()


COUNTS = (2, LARGE)

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
        "undefined operations": (
            MPI.ERR_OP,
            [
                *((name, (*given, MPI.BAND), none) for name in ("Allreduce", "Scan", "Exscan") for given in floats),
                ("Reduce", (a, b, MPI.BOR), none),
                ("Reduce_scatter_block", (blocks, b, MPI.BXOR), none),
                ("Reduce_scatter", (blocks, b, [n] * size, MPI.LAND), none),
                ("Allreduce", (whole, whole.copy(), MPI.MAX), none),
                ("Allreduce", (truths, truths.copy(), MPI.SUM), none),
                *(("Allreduce", ([a, datatype], [b, datatype]), none) for datatype in (MPI.BYTE, MPI.WCHAR)),
                ("Allreduce", (np.ones(n, "i"), np.ones(n, "i"), mpicomm.AVG), none),
                ("Allreduce", (a, b, MPI.OP_NULL), none),
            ],
        ),
        "roots": (
            MPI.ERR_ROOT,
            [
                *((name, (a, blocks), {"root": root}) for name in ("Gather", "Gatherv") for root in (size, -1)),
                *((name, (blocks, b), {"root": root}) for name in ("Scatter", "Scatterv") for root in (size, -1)),
                *(("Bcast", (b,), {"root": root}) for root in (size, -7)),
                *(("Reduce", (a, b), {"root": root}) for root in (size, -7)),
            ],
        ),
        "types that are null or not committed": (
            MPI.ERR_TYPE,
            [
                ("Bcast", (null,), none),
                ("Allreduce", (null, null), none),
                ("Allgather", (null, blocks), none),
                ("Alltoallv", ([blocks, [n] * size, None, MPI.DATATYPE_NULL], blocks.copy()), none),
                ("Alltoallw", (typed[0], typed[1]), none),
                ("Bcast", ([b, n // 2, apart],), none),
            ],
        ),
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
