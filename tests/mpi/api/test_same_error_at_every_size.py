"""Small host calls, in which MPI looks at the arguments, raise the same errors as large ones."""

from __future__ import annotations

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
from mpicomm.mpi.faults import BufferRefusedError

LARGE = 1 << 20  # elements: mapped memory in any case


def test_read_only_memory_is_the_same_error_in_every_call_at_every_size(host_comm: mpicomm.Communicator) -> None:
    everybody = range(host_comm.size)
    graph = host_comm.Create_dist_graph_adjacent(everybody, everybody)  # it has as many neighbours as there are ranks
    for count, (name, operation) in itertools.product((1, LARGE), OPERATIONS.items()):
        receive = np.zeros(count * host_comm.size)
        receive.flags.writeable = False
        given: list[Any] = [np.ones(count * host_comm.size), receive]
        root = (host_comm.rank + (operation.rooted != "receive")) % host_comm.size  # a rank that receives
        if operation.rooted == "bcast":
            given.pop(0)
        if operation.send == "counted":
            given.append([count] * host_comm.size)
        if operation.send == "typed":
            places = [8 * count * peer for peer in range(host_comm.size)]
            given = [[array, [count] * host_comm.size, places, [MPI.DOUBLE] * host_comm.size] for array in given]
        keywords = {"root": root} if operation.rooted else {}
        if host_comm.size == 1 and operation.rooted == "bcast":
            continue  # the root only reads its buffer
        for form in (name, f"I{name.lower()}", f"{name}_init"):
            with pytest.raises(BufferRefusedError, match=r"buf is a .* that is read-only"):
                getattr(graph if operation.of_neighbors else host_comm, form)(*given, **keywords)
    graph.Free()


def test_memory_that_mpi_refuses_in_small_calls_is_the_error_of_large_calls(host_comm: mpicomm.Communicator) -> None:
    for count in (4, LARGE):
        array = np.zeros((2, count))[:, ::2]
        for given in ((array, np.zeros(count)), (np.zeros(count), array)):
            with pytest.raises(BufferRefusedError, match="is neither C- nor Fortran-contiguous"):
                host_comm.Allreduce(*given)


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


def _receives(comm: mpicomm.Communicator, send: Any, receive: Any) -> list[Callable[[], Any]]:
    me = comm.rank
    return [
        *(partial(getattr(comm, name), receive, me) for name in ("Recv", "Irecv", "Recv_init")),
        *(partial(getattr(comm, name), send, me, 0, receive, me) for name in ("Sendrecv", "Isendrecv")),
        lambda: comm.Sendrecv_replace(receive, me, source=me),
        lambda: comm.Isendrecv_replace(receive, me, source=me),
    ]


def _calls(comm: mpicomm.Communicator, send: Any, receive: Any) -> list[Callable[[], Any]]:
    messages = ("Send", "Isend", "Send_init", "Recv", "Irecv", "Recv_init")
    return [
        *(partial(getattr(comm, name), send, receive) for name in ("Allreduce", "Alltoall", "Reduce", "Scan")),
        *(partial(getattr(comm, name), send, 0) for name in messages),
        lambda: comm.Sendrecv(send, 0, 0, receive, 0),
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
        for each in _receives(host_comm, np.ones(count), receive):
            with pytest.raises(BufferRefusedError, match=r"buf is a .* that is read-only"):
                each()


def test_a_missing_buffer_is_a_type_error_in_every_call(host_comm: mpicomm.Communicator) -> None:
    for name, operation in OPERATIONS.items():
        if operation.of_neighbors:
            continue
        given = [None] if operation.rooted == "bcast" else [None, None]
        keywords: dict[str, Any] = {"root": host_comm.rank} if operation.rooted else {}
        if operation.send == "counted":
            keywords["recvcounts"] = [1] * host_comm.size
        for form in operation.methods:
            with pytest.raises(TypeError, match=f"{name}: (sendbuf|recvbuf) is None: pass a|buf is a NoneType, which"):
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


def test_one_type_by_two_names_is_one_type_in_every_reduction(host_comm: mpicomm.Communicator) -> None:
    size = host_comm.size
    names = [("l", MPI.INT64_T, None), ("l", MPI.LONG, MPI.INT64_T), ("d", None, MPI.REAL8), ("d", None, "float64")]
    for count, (code, one, other) in itertools.product((8, LARGE), names):
        for operation in ("Allreduce", "Reduce", "Scan", "Reduce_scatter_block"):
            blocks = size if operation == "Reduce_scatter_block" else 1
            send, receive = np.ones(count * blocks, code), np.zeros(count, code)
            given = [array if name is None else [array, name] for array, name in ((send, one), (receive, other))]
            for form in OPERATIONS[operation].methods:
                receive[:] = 0
                request = getattr(host_comm, form)(*given)
                if form.endswith("_init"):
                    request.Start()
                if request is not None:
                    request.Wait()
                expected = host_comm.rank + 1 if operation == "Scan" else size
                assert (receive == expected).all() or (operation == "Reduce" and host_comm.rank)
                if form.endswith("_init"):
                    request.Free()


def test_names_of_numpys_types_in_every_call(host_comm: mpicomm.Communicator) -> None:
    """mpi4py does not know them, so the root of a small Reduce, which has two buffers, and other ranks must agree."""
    size, rank = host_comm.size, host_comm.rank
    for count in (2, LARGE // 8):
        for name in ("Allreduce", "Reduce", "Scan", "Allgather", "Alltoall", "Bcast", "Gather", "Scatter"):
            operation = OPERATIONS[name]
            send, receive = (
                np.full(count * (size if shape == "blocks" else 1), rank + 1.0)
                for shape in (operation.send, operation.receive)
            )
            arrays = [receive] if name == "Bcast" else [send, receive]
            plain = [array.copy() for array in arrays]
            getattr(host_comm, name)(*([array, "float64"] for array in arrays))
            getattr(host_comm, name)(*plain)
            assert receive.tolist() == plain[-1].tolist(), name
        send, receive = np.full(count, rank + 1.0), np.zeros(count)
        request = host_comm.Irecv([receive, count, "float64"], (rank - 1) % size)
        host_comm.Send([send, count, "float64"], (rank + 1) % size)
        request.Wait()
        assert (receive == (rank - 1) % size + 1).all()


def test_a_named_algorithm_takes_what_only_mpi_can_carry_out(host_comm: mpicomm.Communicator) -> None:
    rank, size = host_comm.rank, host_comm.size
    apart = MPI.INT.Create_vector(2, 1, 2).Commit()
    for count, algorithm in itertools.product((1, LARGE // 4), ("auto", "one_shot")):
        how: dict[str, Any] = {"algorithm": algorithm}
        pairs = np.zeros(count, np.dtype([("value", "f8"), ("rank", "i4")], align=True))
        pairs["value"], pairs["rank"] = 7, rank
        found = np.zeros_like(pairs)
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


def test_elements_of_no_type_are_the_same_error_in_every_call(host_comm: mpicomm.Communicator) -> None:
    for count in (3, LARGE):
        objects = np.empty(count, object)
        for each in _calls(host_comm, objects, objects):
            with pytest.raises(
                BufferRefusedError, match=r"buf has elements of type object, .*: convert it, or move it"
            ):
                each()


def test_a_type_that_only_mpi_knows_has_no_average(host_comm: mpicomm.Communicator) -> None:
    pairs = MPI.DOUBLE.Create_vector(2, 1, 2).Commit()
    for call in (host_comm.Allreduce, host_comm.Iallreduce):
        with pytest.raises(
            InvalidUsageError, match="MPI, which carries out calls of this element type, has no AVG: use"
        ):
            call([np.ones(4), 1, pairs], [np.ones(4), 1, pairs], mpicomm.AVG)
    pairs.Free()
