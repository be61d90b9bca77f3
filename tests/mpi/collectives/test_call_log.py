"""CallLog: the calls of the ranks of a node, and the first calls that differ."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from mpicomm.activity.layout import COUNT_IN_TEXT, OFFSET_IN_TEXT
from mpicomm.cluster.agreement import Group
from mpicomm.collectives.call_log import FOR_GPUS, FOR_HOST, CallLog
from mpicomm.collectives.gpu.call_memory import CallMemory
from mpicomm.errors import CollectiveTimeoutError, PeerError
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.jobs.pace import stretched


@pytest.fixture
def call_log(comm_world: MPI.Intracomm) -> Iterator[CallLog]:
    call_log = CallLog(Group(comm_world, range(comm_world.size), 20.0, tag=78))
    yield call_log
    comm_world.Barrier()
    call_log.close_peers()
    comm_world.Barrier()
    call_log.close_own()


def test_tells_the_last_call_of_each_rank(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    size = comm_world.size
    assert call_log.read() == ["nothing yet"] * size and call_log.behind() == [] and not call_log.differ()
    comm_world.Barrier()
    for text in ("first", "second", "ä" * 300, "second"):
        call_log.post(text)
        comm_world.Barrier()
        assert call_log.read() == [text] * size and call_log.behind() == [] and not call_log.differ()
        comm_world.Barrier()


COUNTED = f"call(count={COUNT_IN_TEXT})"
PLACED = f"call(count={COUNT_IN_TEXT}), into byte {OFFSET_IN_TEXT}"


def test_calls_that_differ_in_a_count_and_an_offset_share_a_text(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    rank, size = comm_world.rank, comm_world.size
    for number, offset in enumerate((0, 5, 1 << 42, 0, 7)):
        for count in (number, 1 << 42):
            call_log.post(PLACED, count, offset)
            comm_world.Barrier()
            assert call_log.read() == [f"call(count={count}), into byte {offset}"] * size and not call_log.differ()
            comm_world.Barrier()
            call_log.post(COUNTED, count) if rank else call_log.post(f"call(count={count})")
            comm_world.Barrier()
            assert call_log.read() == [f"call(count={count})"] * size and not call_log.differ()
            comm_world.Barrier()
    call_log.post(PLACED, 3, rank)
    call_log.post("other")
    comm_world.Barrier()
    assert call_log.differ() == (size > 1)
    if size > 1:
        assert call_log.read() == [f"call(count=3), into byte {each}" for each in range(size)]


def test_a_text_stays_as_long_as_a_call_that_is_kept_has_it(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    rank, size = comm_world.rank, comm_world.size
    for start in range(0, 500, 12):  # more texts than the call log has places for
        call_log.post(COUNTED, start + rank)
        for number in range(12):
            call_log.post(f"text {start + number}")
        comm_world.Barrier()
        last = [f"text {start + 11}"] * size
        assert call_log.read() == ([f"call(count={start + each})" for each in range(size)] if size > 1 else last)
        comm_world.Barrier()


def test_tells_the_late_ranks(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    rank, size = comm_world.rank, comm_world.size
    call_log.post("first")
    comm_world.Barrier()
    if rank == 0:
        call_log.post("second")
    comm_world.Barrier()
    late = " (its previous call: it has not made this one yet)" if rank == 0 else ""
    assert call_log.read() == ["second", *[f"first{late}"] * (size - 1)]
    assert call_log.behind() == (list(range(1, size)) if rank == 0 else [])
    assert not call_log.differ()


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
def test_testifies_of_ranks_in_calls_that_this_rank_has_not_made(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
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


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("later", [0, 1, 5, 14, 15, 40])
def test_tells_where_ranks_began_to_differ(comm_world: MPI.Intracomm, call_log: CallLog, later: int) -> None:
    rank, size = comm_world.rank, comm_world.size
    call_log.post("same")
    call_log.post(f"other {rank > 0}")
    for number in range(later):
        call_log.post(f"same {number % 3}")
    comm_world.Barrier()
    kept = later < 15
    assert call_log.differ() == kept
    last = f"same {(later - 1) % 3}"
    assert call_log.read() == (["other False", *["other True"] * (size - 1)] if kept else [last] * size)


@pytest.mark.mpi(min_size=3)
def test_ranks_that_differ_are_told_while_others_are_late(comm_world: MPI.Intracomm, call_log: CallLog) -> None:
    rank, size = comm_world.rank, comm_world.size
    call_log.post("same")
    if rank:
        call_log.post(f"other {rank > 1}")
    comm_world.Barrier()
    assert call_log.differ() == (rank > 0)  # rank 0 is not there yet, and asks about its own calls
    late = "same" if rank == 0 else "same (its previous call: it has not made this one yet)"
    if rank:
        assert call_log.read() == [late, "other False", *["other True"] * (size - 2)]


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
    assert calls.different(wait=True) == []


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
            call_log.ready()
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
