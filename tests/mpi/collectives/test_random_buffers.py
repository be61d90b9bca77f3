"""Random forms of host buffers in all collectives and messages, against plain mpi4py.

Hypothesis chooses the calls, the same on all ranks; each rank draws the forms of its buffers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mpi4py import MPI

import mpicomm
from mpicomm.collectives.operations import OPERATIONS, Operation
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE
from tests.helpers.rigs.call_forms import FORMS, complete, method_name

EXAMPLES = int(os.environ.get("TEST_BUFFERS", "60"))
UNIT = 16  # bytes, a multiple of each type
COUNTS = (0, 1, 2, 17, 3000, 40_000)
MOVED: list[tuple[Any, int]] = [
    (MPI.BYTE, 1), (MPI.CHAR, 1), (MPI.SIGNED_CHAR, 1), (MPI.DOUBLE, 8), ("d", 8), ("f4", 4), (MPI.LONG, 8),
    (MPI.INT64_T, 8), ("Zd", 16), (MPI.C_BOOL, 1), (MPI.AINT, 8), (MPI.PACKED, 1), ("e", 2), ("bfloat16", 2),
]  # fmt: skip
REDUCED: list[tuple[Any, int]] = [(MPI.INT64_T, 8), (MPI.LONG, 8), ("l", 8), ("q", 8), ("i8", 8), (MPI.LONG_LONG, 8)]
NAMES = (*OF_ONE_TYPE, "Neighbor_allgather", "Neighbor_allgatherv", "Neighbor_alltoall", "Neighbor_alltoallv")
JUNK: tuple[Any, ...] = ([1.0, 2.0], (), object(), 7, "text", None, {}, np.zeros((4, 4))[::2, ::2], [b"", -1, MPI.INT])


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Any, Any]]:
    """A Communicator in which all ranks are neighbours, and the same of plain mpi4py."""
    with mpicomm.Communicator(device="cpu", timeout_s=60) as comm:
        around = range(comm.size)
        pair = [each.Create_dist_graph_adjacent(around, around) for each in (comm, MPI.Intracomm(MPI.COMM_WORLD))]
        yield pair[0], pair[1]
        for each in pair:
            each.Free()


class Forms:
    """Draws forms of buffers: of one rank, with its own generator."""

    def __init__(self, seed: int, rank: int) -> None:
        self._rng = np.random.default_rng((seed, rank))

    def one_of(self, choices: Any) -> Any:
        return choices[int(self._rng.integers(len(choices)))]

    def buffer(self, memory: Any, shape: str, units: list[int], kinds: list[tuple[Any, int]], *, reads: bool) -> Any:
        """Return an argument for ``memory``, an array of bytes with blocks of so many units."""
        datatype, itemsize = self.one_of(kinds)
        each, total = UNIT // itemsize, UNIT * sum(units)
        holders = [memory, memoryview(memory), memory.view("S1"), memory.view("V4"), memory.view("f8")]
        holders += [MPI.memory.fromaddress(memory.ctypes.data if total else 0, total), memory.reshape(4, -1)]
        holders += [memory.tobytes(), bytearray(memory)] if reads else []
        holder = self.one_of(holders)
        if total == 0 and datatype not in ("e", "bfloat16"):
            holder = self.one_of([holder, None, MPI.memory.fromaddress(0, 0)])
        counts = [n * each for n in units]
        plain = [memory.view("i8")] if datatype is MPI.INT64_T else []
        if shape == "vector":
            displs = [sum(counts[:index]) for index in range(len(counts))]
            forms: list[Any] = [[holder, counts, displs, datatype], [holder, (counts, displs), datatype]]
            forms += [(holder, tuple(counts), None, datatype), [holder, (counts, None), datatype]]
            forms += [[holder, np.array(counts), np.array(displs), datatype]]
            forms += [[each, counts] for each in plain]
        else:
            forms = [
                [holder, counts[0], datatype],
                (holder, (counts[0], 0), datatype),
                [holder, counts[0], 0, datatype],
            ]
            if holder is not None:
                forms += [[holder, datatype], (holder, None, datatype)]
            forms += [form for each in plain for form in (each, [each, counts[0]])]
        return self.one_of(forms)


def _units(row: Operation, rank: int, size: int, n: int) -> tuple[list[int], list[int]]:
    """Return the units of each block that a rank sends and that it receives. Equal blocks, if n is less than 2."""
    ragged = [n + each % 3 if n > 1 else n for each in range(size)]
    if "vector" not in (row.send, row.receive):
        ragged = [n] * size
    mine = ragged[rank]
    whole = {"one": [mine], "blocks": [n] * size, "counted": [n * size]}
    if row.of_neighbors:
        same = {"one": [n]}
        return same.get(row.send, [n] * size), [n] * size
    if row.send == row.receive == "vector":
        return [mine] * size, ragged
    return whole.get(row.send, ragged), whole.get(row.receive, ragged)


@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    name=st.sampled_from(NAMES),
    n=st.sampled_from(COUNTS),
    form=st.sampled_from(FORMS),
    seed=st.integers(0, 1 << 20),
    algorithm=st.sampled_from(("auto", "auto", "one_shot")),
)
def test_collectives(pair: tuple[Any, Any], name: str, n: int, form: str, seed: int, algorithm: str) -> None:
    comm, plain = pair
    rank, size, row = comm.rank, comm.size, OPERATIONS[name]
    root, forms = seed % size, Forms(seed, comm.rank)
    kinds, how_carried = REDUCED if row.reduces else MOVED, dict[str, Any]()
    if algorithm != "auto" and name in OF_ONE_TYPE:
        kinds, how_carried = [kind for kind in kinds if kind[0] is not MPI.PACKED], {"algorithm": algorithm}
    send_units, receive_units = _units(row, rank, size, n)
    sent = np.random.default_rng((seed, rank, 1)).integers(0, 256, UNIT * sum(send_units), np.uint8)
    received = np.random.default_rng((seed, rank, 2)).integers(0, 256, UNIT * sum(receive_units), np.uint8)
    simple = Forms(0, 0)
    results = []
    more: dict[str, Any] = {"root": root} if row.rooted else {}
    if row.reduces:
        more["op"] = getattr(MPI, ("SUM", "MAX", "BXOR", "PROD")[seed % 4])
    if row.send == "counted":
        more["recvcounts"] = [n * UNIT // 8] * size
    for each, drawn, types, how in (
        (plain, simple, [(MPI.INT64_T, 8)] if row.reduces else [(MPI.BYTE, 1)], "{}"),
        (comm, forms, kinds, form),
    ):
        memory, source = (_copy(content, odd=each is comm and forms.one_of((0, 0, 1))) for content in (received, sent))
        if row.reduces:  # both buffers of one rank have one type
            types = [forms.one_of(types)]
        if row.rooted == "bcast":
            given = [drawn.buffer(memory, "one", [n], types, reads=rank == root)]
        else:
            given = [
                drawn.buffer(source, row.send, send_units, types, reads=True),
                drawn.buffer(memory, row.receive, receive_units, types, reads=False),
            ]
            if row.rooted == "receive" and rank != root:
                given[1] = None
            if row.rooted == "send" and rank != root:
                given[0] = None
        failure = ""
        try:
            complete(getattr(each, method_name(how, name))(*given, **more, **(how_carried if each is comm else {})))
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        require_success(failure, f"{how} {name} of {n}, seed {seed}")
        results.append(memory)
    different = "" if (results[0] == results[1]).all() else "another result"
    require_success(different, f"{form} {name} of {n}, seed {seed}")


def _copy(content: Any, *, odd: int) -> Any:
    """Return a copy of bytes. At an ``odd`` address larger elements are unaligned: mpi4py has no type for them."""
    copy = np.empty(content.size + 1, np.uint8)[odd : odd + content.size]
    copy[:] = content
    return copy


def require_success(failure: str, what: str) -> None:
    """Fail on all ranks if there is a failure on any rank, because Hypothesis must go on alike on all of them."""
    failures = [f"rank {rank}: {each}" for rank, each in enumerate(MPI.COMM_WORLD.allgather(failure)) if each]
    assert not failures, f"{what}: {'; '.join(failures)}"


@pytest.mark.parametrize("name", ["Reduce", "Allreduce", "Scan", "Exscan", "Reduce_scatter_block"])
@pytest.mark.parametrize("form", FORMS)
def test_reductions_of_empty_buffers_at_one_address(pair: tuple[Any, Any], name: str, form: str) -> None:
    comm, _ = pair
    array = np.empty(0)
    for empty in (MPI.memory.fromaddress(0, 0), array):
        failure = ""
        try:
            complete(getattr(comm, method_name(form, name))([empty, MPI.DOUBLE], [empty, MPI.DOUBLE]), starts=2)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        require_success(failure, f"{form} {name}")


@settings(
    max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    n=st.sampled_from(COUNTS),
    seed=st.integers(0, 1 << 20),
    way=st.sampled_from(("Sendrecv", "Isendrecv", "two", "init")),
)
def test_messages_in_a_row_with_walls(pair: tuple[Any, Any], n: int, seed: int, way: str) -> None:
    comm, _ = pair
    rank, size, forms = comm.rank, comm.size, Forms(seed, comm.rank)
    left, right = (each if 0 <= each < size else MPI.PROC_NULL for each in (rank - 1, rank + 1))
    sent, received = np.full(UNIT * n, rank, np.uint8), np.full(UNIT * n, 99, np.uint8)
    sent, received = (_copy(each, odd=forms.one_of((0, 0, 1))) for each in (sent, received))
    send = forms.one_of(JUNK) if right == MPI.PROC_NULL else forms.buffer(sent, "one", [n], MOVED, reads=True)
    receive = forms.one_of(JUNK) if left == MPI.PROC_NULL else forms.buffer(received, "one", [n], MOVED, reads=False)
    if way == "Sendrecv":
        comm.Sendrecv(send, right, 3, receive, left, 3)
    elif way == "Isendrecv":
        comm.Isendrecv(send, right, 3, receive, left, 3).Wait()
    elif way == "two":
        requests = [comm.Irecv(receive, left, 3), forms.one_of([comm.Isend, comm.Issend])(send, right, 3)]
        MPI.Request.Waitall(requests)
    else:
        requests = [comm.Recv_init(receive, left, 3), comm.Send_init(send, right, 3)]
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        for request in requests:
            request.Free()
    expected = 99 if left == MPI.PROC_NULL else left
    alike = bool((received == expected).all())
    assert MPI.COMM_WORLD.allreduce(alike, MPI.LAND), f"{way} of {n}, seed {seed}: rank {rank} {alike}"
