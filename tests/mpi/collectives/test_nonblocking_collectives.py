"""Nonblocking and persistent collectives: requests of mpicomm and of MPI, separate and mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError, PeerError
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.mpi.requests import Completer
from mpicomm.waiting import wait_until
from tests.helpers.inputs.buffers import Placed, values
from tests.helpers.inputs.communicator_calls import OF_ONE_TYPE, Case, Prepared
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import dtype_or_skip
from tests.helpers.rigs.communicators import array_module, communicator

FLOAT32 = np.dtype(np.float32)
REPEATS = 50


def sum_of(comm: mpicomm.Communicator, name: str, count: int = 101, **more: Any) -> Case:
    return Case("Allreduce", dtype_or_skip(name), count, **more)


@pytest.mark.parametrize("name", ["float32", "int64", "float16", "bfloat16"])
def test_a_persistent_request_works_again_and_again(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    prepared = Prepared(sum_of(comm, name, op="prod"), comm.rank, comm.size, xp)
    request = prepared.prepare(comm)
    assert isinstance(request, MPI.Prequest)
    for number in range(REPEATS):
        prepared.renew(number)
        request.Start()
        if number % 2:
            while not request.Test():
                pass
        else:
            request.Wait()
        prepared.check()
    # One that is not active is complete.
    request.Wait()
    assert request.Test()
    request.Free()


def calls_of_every_kind(comm: mpicomm.Communicator) -> list[Case]:
    half = dtype_or_skip("float16")
    operations = [Case(name, half, 9, in_place=place) for name in OF_ONE_TYPE for place in (False, name != "Bcast")]
    reductions = [name for name in OF_ONE_TYPE if OPERATIONS[name].reduces]
    options: list[dict[str, Any]] = [{"op": "avg"}, {"op": "a * 2 - b"}, {"algorithm": "one_shot"}]
    cases = [Case(name, FLOAT32, 9, **option) for name in reductions for option in options]
    cases += [Case(name, FLOAT32, 9, wire="int8") for name in ("Allreduce", "Allgather", "Reduce_scatter_block")]
    cases += [Case("Alltoall", FLOAT32, 9, algorithm="one_shot", in_place=place) for place in (False, True)]
    # Without recvcounts, which a case passes only in place, the ranks exchange counts first, as in mpi4py.
    return [case for case in operations + cases if case.operation != "Reduce_scatter" or case.in_place]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["start", "prepare"])
def test_a_start_waits_for_no_rank(comm: mpicomm.Communicator, xp: Any, method: str) -> None:
    """The other ranks start only after rank 0 has told them that it has started."""
    plain = MPI.Intracomm(MPI.COMM_WORLD)
    waits = []
    for case in calls_of_every_kind(comm):
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


def mixture(comm: mpicomm.Communicator, xp: Any) -> tuple[list[Prepared], list[MPI.Request], Any]:
    """Requests of mpicomm's, between MPI's own of messages around a ring."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    token, received = np.array([comm.rank, 77]), np.zeros(2, int)
    several = [
        Prepared(sum_of(comm, name, 1001), comm.rank, comm.size, xp) for name in ("float16", "float32", "float64")
    ]
    plain = MPI.COMM_WORLD
    requests = [plain.Irecv(received, left, 5), *(each.start(comm) for each in several), plain.Isend(token, right, 5)]
    return several, requests, received


@pytest.mark.parametrize("way", ["Waitall", "Testall", "Waitany", "Waitsome"])
def test_mpi_completes_mixtures_with_its_own_requests(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    for _ in range(5):
        several, requests, received = mixture(comm, xp)
        statuses = [MPI.Status() for _ in requests]
        if way == "Waitall":
            MPI.Request.Waitall(requests, statuses)
            assert (statuses[0].source, statuses[0].tag) == ((comm.rank - 1) % comm.size, 5)
            assert statuses[0].Get_count(MPI.INT64_T) == 2
            assert not any(status.Is_cancelled() for status in statuses)
        elif way == "Testall":
            while not MPI.Request.Testall(requests):
                pass
        elif way == "Waitany":
            done = {MPI.Request.Waitany(requests) for _ in requests}
            assert done == set(range(len(requests)))
        else:
            complete: list[int] = []
            while len(complete) < len(requests):
                complete += MPI.Request.Waitsome(requests) or []
            assert sorted(complete) == list(range(len(requests)))
        assert all(request == MPI.REQUEST_NULL for request in requests)
        assert received.tolist() == [(comm.rank - 1) % comm.size, 77]
        for each in several:
            each.check()


@pytest.mark.parametrize("way", ["Waitall", "Testall", "Waitany", "Waitsome"])
def test_mpi_completes_persistent_requests_that_are_started(comm: mpicomm.Communicator, xp: Any, way: str) -> None:
    # Not MPI's own on the host: MPICH 5 cannot Testall persistent collectives.
    names = ("float16", "bfloat16", "float8_e5m2")
    several = [Prepared(sum_of(comm, name, 101), comm.rank, comm.size, xp) for name in names]
    requests = [each.prepare(comm) for each in several]
    for number in range(10):
        for each, request in zip(several, requests, strict=True):
            each.renew(number)
            request.Start()
        if way == "Waitall":
            MPI.Request.Waitall(requests)
        elif way == "Testall":
            while not MPI.Request.Testall(requests):
                pass
        else:
            left = set(range(len(requests)))
            while left:
                done = getattr(MPI.Request, way)(requests)
                left -= {done} if way == "Waitany" else set(done)
        for each, request in zip(several, requests, strict=True):
            assert request.Test()
            each.check()
    for each in several:
        each.renew(10)
    MPI.Prequest.Startall(requests)
    MPI.Request.Waitall(requests)
    for each in several:
        each.check()
    for request in requests:
        request.Free()


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_status_of_a_collective(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    prepared = Prepared(sum_of(comm, name), comm.rank, comm.size, xp)
    request = prepared.start(comm)
    status = MPI.Status()
    request.Wait(status)
    assert status.Get_error() == MPI.SUCCESS
    assert not status.Is_cancelled()


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_start_of_an_active_request_is_an_error(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    prepared = Prepared(sum_of(comm, name), comm.rank, comm.size, xp)
    request = prepared.prepare(comm)
    request.Start()
    with pytest.raises(MPI.Exception) as raised:
        request.Start()
    assert raised.value.Get_error_class() == MPI.ERR_REQUEST
    request.Wait()
    prepared.check()
    request.Free()


@pytest.mark.parametrize("name", ["float32", "float16"])
def test_start_after_free_is_an_error(comm: mpicomm.Communicator, xp: Any, name: str) -> None:
    prepared = Prepared(sum_of(comm, name), comm.rank, comm.size, xp)
    request = prepared.prepare(comm)
    request.Start()
    request.Wait()
    request.Free()
    with pytest.raises((InvalidUsageError, MPI.Exception)):
        request.Start()
    prepared.check()


def test_free_of_a_request_that_never_started(comm: mpicomm.Communicator, xp: Any) -> None:
    for name in ("float32", "float16"):
        Prepared(sum_of(comm, name), comm.rank, comm.size, xp).prepare(comm).Free()
    prepared = Prepared(sum_of(comm, "float32"), comm.rank, comm.size, xp)
    prepared.start(comm).Wait()
    prepared.check()


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


def test_bad_arguments_are_refused_when_prepared(comm: mpicomm.Communicator, xp: Any) -> None:
    buffer = Placed(xp, np.zeros(4, np.float16))
    with pytest.raises(InvalidUsageError, match="root=99 is no rank"):
        comm.Bcast_init(buffer.array, root=99)
    with pytest.raises(InvalidUsageError, match="unknown"):
        comm.Iallreduce(MPI.IN_PLACE, buffer.array, algorithm="quick")
    with pytest.raises(InvalidUsageError, match="not defined for float16"):
        comm.Allreduce_init(MPI.IN_PLACE, buffer.array, MPI.BAND)


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


def test_requests_of_a_communicator_may_outlive_other_calls_on_it(comm: mpicomm.Communicator, xp: Any) -> None:
    first = Prepared(sum_of(comm, "float32", 5003), comm.rank, comm.size, xp)
    request = first.start(comm)
    for number in range(5):
        between = Prepared(sum_of(comm, "int32", 50, seed=number), comm.rank, comm.size, xp)
        between.run(comm)
        comm.Barrier()
        comm.check()
        between.check()
    request.Wait()
    first.check()


def test_values_are_read_at_the_start(comm: mpicomm.Communicator, xp: Any) -> None:
    """A persistent collective reads its buffers when started, not when prepared."""
    send, receive = Placed(xp, np.zeros(7, np.float16)), Placed(xp, np.full(7, 9, np.float16))
    request = comm.Allreduce_init(send.array, receive.array)
    send.set(values(np.dtype(np.float16), 7, comm.rank))
    assert (receive.get() == 9).all()
    request.Start()
    request.Wait()
    expected = sum(values(np.dtype(np.float16), 7, rank) for rank in range(comm.size))
    assert receive.get().tolist() == np.asarray(expected).tolist()
    request.Free()


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
