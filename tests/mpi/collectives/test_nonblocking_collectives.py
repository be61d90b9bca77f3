"""Nonblocking and persistent collectives, and the buffers that requests keep.

test_random_collectives.py has more calls.
"""

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
from mpicomm import PeerError
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.requests import Completer
from mpicomm.waiting import wait_until
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, REDUCTIONS, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator

FLOAT32 = np.dtype(np.float32)


def calls_of_every_kind() -> list[Case]:
    half = dtype_or_skip("float16")
    cases = [Case(name, half, 9, in_place=place) for name in OF_ONE_TYPE for place in (False, name != "Bcast")]
    options: list[dict[str, Any]] = [{"op": "avg"}, {"op": "a * 2 - b"}, {"algorithm": "one_shot"}]
    cases += [Case(name, FLOAT32, 9, **option) for name in REDUCTIONS for option in options]
    cases += [Case(row.name, FLOAT32, 9, wire="int8") for row in OPERATIONS.values() if row.coded]
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
    monkeypatch.setattr(Completer, "add", lambda self, work, prepare_thread: work)  # only `Wait` completes it
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
