"""Ranks that call different things or do not come, the log that tells them, and threads that compute meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError, PeerError
from mpicomm.activity.layout import COUNT_IN_TEXT, LOG_DEPTH, OFFSET_IN_TEXT
from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import FOR_GPUS, FOR_HOST, CallLog
from mpicomm.collectives.gpu.call_memory import CallMemory
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.inputs.buffers import Placed
from tests.helpers.inputs.communicator_calls import Case, Prepared, require_works
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import array_module, communicator, patience_s

FLOAT32 = np.dtype(np.float32)
LARGE = 1 << 20  # elements: mapped memory in any case


def test_a_freed_communicator_says_so(device: str) -> None:
    """Also to known calls and requests. mpi/api/test_errors.py has all calls on the host."""
    comm = communicator(device)
    with array_module(comm) as xp:
        half, large = (Placed(xp, np.ones(count, name)).array for count, name in ((3, np.float16), (LARGE, FLOAT32)))
        request = comm.Allreduce_init(MPI.IN_PLACE, half)
        require_works(comm, xp)
        comm.Allreduce(MPI.IN_PLACE, half)
        comm.Free()
        calls: list[Callable[[], Any]] = [request.Start, comm.check, comm.Barrier]
        for array in (half, large):
            calls += [partial(each, MPI.IN_PLACE, array) for each in (comm.Allreduce, comm.Iallreduce)]
        calls.append(lambda: comm.Allreduce_init(MPI.IN_PLACE, half).Start())
        for each in calls:
            with pytest.raises(InvalidUsageError, match=r"the communicator was freed; create another"):
                each()


def test_a_thread_computes_while_another_one_is_in_collectives(comm: mpicomm.Communicator, xp: Any) -> None:
    stop, sums = threading.Event(), []

    def compute() -> None:
        with array_module(comm) as module:
            stream = module.cuda.Stream(non_blocking=True) if module is not np else None
            while True:
                if stream is None:
                    sums.append(float((module.arange(20_000.0) * 2).sum()))
                else:
                    with stream:
                        sums.append(float((module.arange(20_000.0) * 2).sum()))
                if stop.is_set():
                    return

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        for number in range(60):
            count, algorithm = (5, 4097, 70_001)[number % 3], ("one_shot", "auto")[number % 2]
            case = Case("Allreduce", FLOAT32, count, algorithm=algorithm, seed=number)
            prepared = Prepared(case, comm.rank, comm.size, xp)
            prepared.run(comm)
            comm.check()
            prepared.check()
    finally:
        stop.set()
        thread.join()
    assert sums and set(sums) == {20_000.0 * 19_999.0}


DIFFERENT: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, str]]] = {
    # The difference: what rank 0 passes, what the others pass, and what the error says of both.
    "operation": ({"operation": "Allreduce"}, {"operation": "Scan"}, ("Allreduce", "Scan")),
    "count": ({"count": 5}, {"count": 7}, ("count=5", "count=7")),
    "large count": ({"count": 5}, {"count": LARGE}, ("count=5", f"count={LARGE}")),
    "dtype": ({"dtype": np.dtype(np.int32)}, {"dtype": FLOAT32}, ("int32", "float32")),
    "bytes of movement": (
        {"operation": "Allgather", "dtype": np.dtype(np.float64), "count": 4},
        {"operation": "Allgather", "dtype": FLOAT32, "count": 9},
        ("count=32", "count=36"),
    ),
    "op": ({"op": "sum"}, {"op": "max"}, ("op=sum", "op=max")),
    "expression": ({"op": "sum"}, {"op": "a * 2 - b"}, ("op=sum", "op=a * 2 - b")),
    "algorithm": ({}, {"algorithm": "two_shot"}, ("algorithm=one_shot", "algorithm=two_shot")),
    "ring": ({}, {"algorithm": "ring"}, ("algorithm=one_shot", "algorithm=ring")),
    "order": ({"more": {"order": "tree"}}, {}, ("op=tree", "op=sum")),
    "operand": (
        {"more": {"epilogue": "v * n", "n": 0}},
        {"more": {"epilogue": "v * n", "n": 1}},
        ("epilogue='v * n', n=0", "epilogue='v * n', n=1"),
    ),
    "epilogue": ({"more": {"epilogue": "v * n", "n": 0}}, {}, ("epilogue='v * n', n=0", "op=sum, algorithm")),
    "wire types": ({"wire": "int8"}, {"wire": "float8_e4m3fn"}, ("wire_dtype=int8", "wire_dtype=float8_e4m3fn")),
    "wire types of results": ({"wire": "int8"}, {"more": {"wire_dtype": ("int8", None)}}, ("wire_dtype=int8", "None")),
    **{
        f"root of {name}": ({"operation": name}, {"operation": name, "root": 1}, ("root=0", "root=1"))
        for name in ("Bcast", "Gather", "Reduce", "Scatter")
    },
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_call_different_things_are_told_who_said_what(device: str, what: str) -> None:
    if "order" in str(DIFFERENT[what]) and 64 % MPI.COMM_WORLD.size:
        pytest.skip("so many ranks have no tree")
    # Some ranks wait for each other, until their time is up, or until another rank tells them.
    comm = communicator(device, timeout_s=HANG_S if what.startswith("root") else stretched(10.0))
    first, others, said = DIFFERENT[what]
    same: dict[str, Any] = {"operation": "Allreduce", "dtype": FLOAT32, "count": 5, "algorithm": "one_shot"}
    case = Case(**same | (others if comm.rank else first))
    with array_module(comm) as xp:
        prepared = Prepared(case, comm.rank, comm.size, xp)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), comm.rank, comm.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError, match=r"ranks called different things: rank 0: ") as info:
            prepared.run(comm)
            comm.check()
            after.run(comm)  # a rank that had nothing to wait for is told at its next call
            comm.check()
        require_unusable(comm, after, PeerError)
    text = str(info.value)
    for rank in range(comm.size):
        assert re.search(rf"rank {rank}: [^;]*{re.escape(said[rank > 0])}", text), text
    comm.Free()
    require_a_new_one_works(device)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("expected", [4, 6, 10**7])
def test_two_ranks_that_disagree_on_counts_are_told(device: str, expected: int) -> None:
    comm = communicator(device, timeout_s=stretched(10.0))
    rank, size = comm.rank, comm.size
    sent, received = [5] * size, [5] * size
    if rank == size - 1:
        received[0] = expected
    with array_module(comm) as xp:
        blocks, target = xp.zeros(sum(sent), FLOAT32), xp.zeros(sum(received), FLOAT32)
        after = Prepared(Case("Allreduce", FLOAT32, 3, algorithm="one_shot"), rank, size, xp)
        told = "rank . sent data of another call|rank 0 sends 20 bytes, but"
        with pytest.raises(PeerError, match=told):
            comm.Alltoallv([blocks, sent], [target, received], algorithm="one_shot")
            comm.check()
            after.run(comm)  # as above
            comm.check()
        require_unusable(comm, after, PeerError)
    comm.Free()
    require_a_new_one_works(device)


def require_unusable(comm: mpicomm.Communicator, prepared: Prepared, error: type[Exception]) -> None:
    for _ in range(2):
        with pytest.raises(error):
            prepared.run(comm)
            comm.check()


def require_a_new_one_works(device: str) -> None:
    with communicator(device) as new, array_module(new) as xp:
        require_works(new, xp)


@pytest.mark.mpi(min_size=2)
def test_the_other_way_that_a_peer_may_have_taken_is_named() -> None:
    """The ranks pass counts on both sides of the size from which calls go through mapped memory."""
    comm, few = communicator("cpu", timeout_s=patience_s("cpu")), (np.ones(10), np.zeros(10))
    if comm.rank == 1:
        comm.Allreduce(*few)
        with pytest.raises(CollectiveTimeoutError, match="this is rank 1, which came later"):
            comm.Free()
        return
    text = "^Allreduce: .*rank 1 did not arrive within .* may be in MPI's Allreduce"
    with pytest.raises(CollectiveTimeoutError, match=text) as info:
        comm.Allreduce(np.ones(LARGE), np.zeros(LARGE))
    assert info.value.ranks == (1,)
    MPI.Intracomm.Allreduce(comm, *few)  # for which rank 1 waits
    comm.Free()


@pytest.mark.mpi(min_size=2)
def test_other_communicators_go_on_when_one_is_unusable(device: str) -> None:
    with communicator(device) as good, array_module(good) as xp:
        child = good.Dup()
        require_works(child, xp)
        case = Case("Allreduce", FLOAT32, 5 + good.rank, algorithm="one_shot")
        prepared = Prepared(case, good.rank, good.size, xp)
        with raises_everywhere(MPI.COMM_WORLD, PeerError):
            prepared.run(child)
            child.check()
        require_works(good, xp)
        child.Free()
        require_works(good, xp)


@pytest.fixture
def call_log(comm_world: MPI.Intracomm) -> Iterator[CallLog]:
    call_log = CallLog(Group(comm_world, range(comm_world.size), 20.0, tag=78))
    yield call_log
    comm_world.Barrier()
    call_log.close_peers()
    comm_world.Barrier()
    call_log.close_own()


COUNTED = f"call(count={COUNT_IN_TEXT})"
PLACED = f"call(count={COUNT_IN_TEXT}), into byte {OFFSET_IN_TEXT}"
LATE = " (its previous call: it has not made this one yet)"


def require_read(call_log: CallLog, posted: list[list[str]], rank: int) -> None:
    """Compare with the texts of the calls that each rank has posted."""
    made = len(posted[rank])
    behind = [peer for peer, calls in enumerate(posted) if len(calls) < made]
    expected = [calls[-1] + LATE * (peer in behind) if calls else "nothing yet" for peer, calls in enumerate(posted)]
    differ = False
    for number in range(max(0, made - LOG_DEPTH + 1), made):
        texts = [calls[number] if number < len(calls) else None for calls in posted]
        if len({*texts} - {None}) > 1:
            expected, differ = [text or last for text, last in zip(texts, expected, strict=True)], True
            break
    assert (call_log.read(), call_log.differ(), call_log.behind()) == (expected, differ, behind)


def test_random_calls_that_differ_on_ranks_that_come_late(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    """They have more texts than the call log has places for. Calls that differ only in numbers share a text."""
    rank, ranks, draw, own = comm_world.rank, range(comm_world.size), Random(1), Random(comm_world.rank)
    posted: list[list[str]] = [[] for _ in ranks]
    require_read(call_log, posted, rank)
    for number in range(400):
        kind, count = draw.choice(("plain", "plain", "plain", "counted", "placed")), draw.choice((0, number, 1 << 42))
        differs, late = draw.random() < 0.06, [each for each in ranks if draw.random() < 0.2]
        forms: list[list[tuple[Any, ...]]] = []  # for each rank what it may post; the first is the text alone
        for each in (count + differs * peer for peer in ranks):
            text = f"call(count={each})" if kind == "counted" else f"call(count={each}), into byte {number}"
            shared = (COUNTED, each) if kind == "counted" else (PLACED, each, number)
            forms.append(
                [(f"call {number} of {each}" + "ä" * (number % 300),)] if kind == "plain" else [(text,), shared]
            )
        for part in ([each for each in ranks if each not in late], late):
            comm_world.Barrier()  # all have read
            for each in part:
                posted[each].append(forms[each][0][0])
            if rank in part:
                call_log.post(*own.choice(forms[rank]))
            comm_world.Barrier()
            require_read(call_log, posted, rank)


def test_one_vote_for_gpus_decides(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    rank, size = comm_world.rank, comm_world.size
    calls = 5000  # more than the call log has marks for
    for call in range(1, calls + 1):
        assert call_log.vote(FOR_HOST if call % 3 or rank != call % size else FOR_GPUS) == call
    comm_world.Barrier()
    for call in (calls - 1000, *range(calls - 7, calls + 1)):
        assert call_log.location(call) == ("host" if call % 3 else "gpu")
    assert call_log.location(calls + 1) is None
    comm_world.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_call_is_on_the_host_after_the_votes_of_all(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    if comm_world.rank:
        call_log.vote(FOR_HOST)
    comm_world.Barrier()
    assert call_log.location(1) is None
    comm_world.Barrier()
    if not comm_world.rank:
        call_log.vote(FOR_HOST)
        call_log.withdraw_vote()
        call_log.vote(FOR_HOST)
    comm_world.Barrier()
    assert call_log.location(1) == "host"


@pytest.mark.mpi(min_size=2)
def test_the_absence_reason_names_ranks_in_calls_not_made_here(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    call_log.post("first")
    comm_world.Barrier()
    assert call_log.absence_reason() == ""
    comm_world.Barrier()
    if comm_world.rank == 0:
        call_log.post("second")
    comm_world.Barrier()
    if comm_world.rank == 0:
        assert call_log.absence_reason() == ""
    else:
        assert call_log.absence_reason().startswith("rank 0 is in second, or has left it; rank ")
    comm_world.Barrier()
    call_log.close_peers()
    assert call_log.absence_reason() == ""


def test_no_text_is_half_written(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    texts = [letter * length for letter in "abcdefgh" for length in (200, 30, 256, 1, *range(40, 60))]
    call_log.post("a")
    comm_world.Barrier()
    until = time.monotonic() + 0.3
    while time.monotonic() < until:
        if comm_world.rank == 0:
            for text in texts:
                call_log.post(text)
            time.sleep(1e-5)
        else:
            assert call_log.read()[0] in [*texts, "a"]


# The errors of the engine of GPUs.


def calls_on(comm_world: MPI.Intracomm, call_log: CallLog, timeout_s: float = 20.0) -> CallMemory:
    backend, arena = SimpleNamespace(fail=lambda error: None), SimpleNamespace(abort=lambda: None)
    return CallMemory(Group(comm_world, range(comm_world.size), timeout_s, tag=79), call_log, backend, arena)  # type: ignore[arg-type]


def test_ranks_that_call_the_same_go_on(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    calls = calls_on(comm_world, call_log)
    for number in range(5):
        if comm_world.rank == number % comm_world.size:
            time.sleep(0.02)
        call_log.post(f"call {number}")
        calls.wait_for(call_log.behind)
    comm_world.Barrier()
    assert calls.differing_calls(wait=True) == []


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_known", [False, True])
def test_ranks_meet_when_all_of_them_launch_next(comm_world: MPI.Intracomm, call_log: CallLog, is_known: bool) -> None:
    calls, late = calls_on(comm_world, call_log), time.monotonic()
    for number in range(3):
        if not is_known:
            call_log.post(f"call {number}")
            calls.wait_for(call_log.behind)
        if comm_world.rank == 0:  # it has called the same, and loads a kernel
            time.sleep(0.1)
            late = time.monotonic()
        if is_known:
            call_log.post(f"call {number}", ready=True)
        else:
            call_log.publish_ready()
        calls.wait_for(call_log.not_ready)
        met = time.monotonic()
        assert met >= comm_world.bcast(late)  # the ranks of a node have one clock


@pytest.mark.mpi(min_size=2)
def test_ranks_that_call_different_things_are_told_all_calls(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    calls = calls_on(comm_world, call_log)
    if comm_world.rank == comm_world.size - 1:
        time.sleep(0.1)  # its line is waited for
    call_log.post(f"call {comm_world.rank > 0}")
    said = "; ".join(f"rank {rank}: call {rank > 0}" for rank in range(comm_world.size))
    with raises_everywhere(comm_world, PeerError, match=said):
        calls.wait_for(call_log.behind)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_call_is_named_in_time(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    limit_s = stretched(0.3)
    calls = calls_on(comm_world, call_log, timeout_s=limit_s)
    if comm_world.rank > 0:
        call_log.post("call")
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=f"rank 0 did not come within {limit_s:g} s") as info:
            calls.wait_for(call_log.behind)
        assert info.value.ranks == (0,)
        assert time.monotonic() - start < limit_s + stretched(1.0)
    comm_world.Barrier()
