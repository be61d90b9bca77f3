"""The waits between ranks that are made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from mpicomm.activity.reading import Activity, BlockedMessage, RankCalls, Step
from mpicomm.doctor.running import Job, Process, Rank
from mpicomm.doctor.waits import Look

NOW_NS = 100_000_000_000
SUM = "Allreduce(float64, count=4, op=sum)"


def calls(rank: int, made: int, last: str = SUM, *, ago_s: float | None = 10.0, size: int = 3) -> RankCalls:
    since_ns = None if ago_s is None else NOW_NS - int(ago_s * 1e9)
    return RankCalls(7, "world", rank, size, 0, made, last, since_ns, False)


def rank(number: int, *communicators: RankCalls, step: Step | None = None, **process: object) -> Rank:
    facts = replace(Process(1000 + number, 1, "python"), **process)  # type: ignore[arg-type]
    return Rank(facts, Activity(1000 + number, number, 3, step, communicators), 1, NOW_NS)


def earlier(one: Rank, seconds: float = 3.0) -> Rank:
    return replace(one, time_ns=one.time_ns - int(seconds * 1e9))


def look(
    ranks: Sequence[Rank], before: Sequence[Rank] = (), unseen: dict[tuple[int, int], Process] | None = None
) -> Look:
    was = before or [earlier(each) for each in ranks]
    return Look(Job(tuple(ranks), unseen or {}), {each.process.pid: each for each in was})


def texts(*ranks: Rank) -> list[str]:
    return [wait.text for wait in look(ranks).waits()]


def test_the_rank_with_the_fewest_calls_is_late() -> None:
    ranks = [rank(0, calls(0, 5)), rank(1, calls(1, 5, ago_s=12.0)), rank(2, calls(2, 4, "Bcast(int8)", ago_s=15.0))]
    (wait,) = look(ranks).waits()
    assert wait.text == (
        f"rank 2 is behind: it has made 4 calls of world, the others 5 ({SUM}). Rank 2 (process 1002) sleeps, and has "
        "begun no collective call since Bcast(int8) 15.0 s ago"
    )
    assert (wait.seconds, wait.known, wait.pids) == (12.0, True, (1002,))


def test_ranks_that_go_on_are_not_late_and_several_may_be() -> None:
    (said,) = texts(rank(0, calls(0, 5)), rank(1, calls(1, 4)), rank(2, calls(2, 1)))
    assert said.startswith(f"ranks 1, 2 are behind: they have made 1 to 4 calls of world, the others 5 ({SUM}). Rank 1")
    ranks = [rank(0, calls(0, 5)), rank(1, calls(1, 4))]
    assert look(ranks, [ranks[0], rank(1, calls(1, 3))]).waits() == []
    # A call is the same in MPI and in mapped memory.
    assert texts(rank(0, calls(0, 5, "Allreduce", ago_s=None)), rank(1, calls(1, 5)), rank(2, calls(2, 5))) == []


def test_a_wait_in_mpi_is_as_old_as_the_look() -> None:
    ranks = [rank(0, calls(0, 5, "Allreduce", ago_s=None)), rank(1, calls(1, 4))]
    (wait,) = look(ranks).waits()
    assert (wait.seconds, wait.known) == (3.0, False)


def test_ranks_that_have_called_different_things() -> None:
    (said,) = texts(rank(0, calls(0, 5)), rank(1, calls(1, 5, "Bcast")), rank(2, calls(2, 5)))
    assert said == f"ranks called different things as number 5 of world: rank 0: {SUM}; rank 1: Bcast; rank 2: {SUM}"


def by_mpi(rank: int, calls_by_mpi: int, others: int, last: str) -> RankCalls:
    """The calls of a rank, of which the last one is by MPI."""
    made = calls(rank, others, last, ago_s=None, size=2)
    return replace(made, by_mpi=calls_by_mpi, last_post="Bcast(float32, count=3, root=0)" if others else "")


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((4, 1, "Barrier"), (4, 0, "Allreduce")),  # rank 0 has left the root's Bcast early
        ((5, 1, "Allreduce"), (4, 2, "Allreduce")),
    ],
)
def test_ranks_that_wait_in_mpi_after_calls_in_different_orders(
    mine: tuple[int, int, str], theirs: tuple[int, int, str]
) -> None:
    for first, second in ((mine, theirs), (theirs, mine)):
        ranks = [rank(0, by_mpi(0, *first)), rank(1, by_mpi(1, *second))]
        (wait,) = look(ranks).waits()
        assert wait.text.startswith(
            f"ranks called different things of world: rank 0: {first[2]} by MPI, its call {first[0]} by MPI, after "
            f"{first[1]} other call"
        )
        assert f"rank 1: {second[2]} by MPI, its call {second[0]} by MPI, after {second[1]} other call" in wait.text
        assert "(the last is Bcast(float32, count=3, root=0))" in wait.text and "end the job, and make" in wait.text
        assert wait.pids == (1000, 1001)
        assert [line.waits_for for line in look(ranks).lines()] == ["rank 1", "rank 0"]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        ((4, 1, "Barrier"), (4, 1, "Barrier")),
        ((5, 1, "Barrier"), (4, 1, "Barrier")),
        ((5, 2, "Barrier"), (4, 1, "Barrier")),  # rank 1 is late in both kinds of calls
    ],
)
def test_ranks_with_calls_in_one_order(mine: tuple[int, int, str], theirs: tuple[int, int, str]) -> None:
    for first, second in ((mine, theirs), (theirs, mine)):
        said = texts(rank(0, by_mpi(0, *first)), rank(1, by_mpi(1, *second)))
        assert all("behind" in each for each in said) and len(said) == (mine != theirs)
    going_on = [rank(0, by_mpi(0, 4, 1, "Barrier")), rank(1, by_mpi(1, 4, 0, "Allreduce"))]
    before = [earlier(going_on[0]), earlier(rank(1, by_mpi(1, 3, 0, "Barrier")))]
    assert look(going_on, before).waits() == []


def test_ranks_that_send_to_each_other() -> None:
    ranks = [
        rank(each, replace(calls(each, 5), messages=(BlockedMessage("send", 1 - each, 3, 9),))) for each in range(2)
    ]
    assert texts(*ranks) == [
        f"rank {each} waits in a send to rank {1 - each} (tag 3) of world. Rank {1 - each} (process {1001 - each}) "
        f"sends to rank {each} (tag 3) of world, and has begun no collective call since {SUM} 10.0 s ago"
        for each in range(2)
    ]


def test_a_receive_from_any_rank_and_messages_one_after_the_other() -> None:
    def receiving(number: int, source: int = 1) -> list[Rank]:
        message = BlockedMessage("receive", source, -1 if source < 0 else 0, number)
        return [rank(0, replace(calls(0, 5), messages=(message,))), rank(1, calls(1, 5))]

    assert texts(*receiving(1, -2)) == ["rank 0 waits in a receive from any rank of world"]
    assert look(receiving(8), [earlier(each) for each in receiving(7)]).waits() == []


def test_a_chain_of_waits_begins_with_the_rank_that_does_not_wait() -> None:
    step = Step("Free", NOW_NS - int(60e9), (0, 1, 2))
    receiving = replace(calls(1, 5), messages=(BlockedMessage("receive", 2, 3, 9),))
    ranks = [rank(0, step=step), rank(1, receiving), rank(2, calls(2, 5))]
    first, second = look(ranks).waits()
    assert first.text.startswith("rank 1 waits in a receive from rank 2 (tag 3) of world. Rank 2 (process 1002) sleeps")
    assert second.text == (
        "ranks 1, 2 of MPI.COMM_WORLD have not come: rank 0 waits in 'Free'. Rank 1 (process 1001) receives from rank "
        "2 (tag 3) of world. Rank 2 (process 1002) sleeps"
    )
    assert (first.pids, second.pids, second.seconds) == ((1002,), (1002,), 60.0)


def test_a_rank_that_has_not_come_to_a_step_has_no_communicator_or_no_process() -> None:
    step = Step("Communicator", NOW_NS - int(5e9), (0, 1, 2))
    (wait,) = look([rank(0, step=step)], unseen={(1, 2): Process(77, 1, "python")}).waits()
    assert wait.text == (
        "ranks 1, 2 of MPI.COMM_WORLD have not come: rank 0 waits in 'Communicator'. Rank 1 has no process on this "
        "machine: it has ended, or runs on another node. Rank 2, process 77, has not begun to make a Communicator"
    )
    assert wait.pids == (77,)


def test_what_a_process_does() -> None:
    ahead = rank(0, calls(0, 5))

    def said_of(late: Rank, cpu_s: float = 0.0) -> str:
        was = replace(earlier(late), process=replace(late.process, cpu_s=late.process.cpu_s - cpu_s))
        (wait,) = look([ahead, late], [earlier(ahead), was]).waits()
        return wait.text.partition("(process 1001) ")[2].partition(", and has")[0]

    assert said_of(rank(1, calls(1, 4), state="T")) == "is stopped, by a signal or a debugger"
    assert said_of(rank(1, calls(1, 4), sleeps_in="futex_wait_queue")) == "sleeps (futex_wait_queue)"
    assert said_of(rank(1, calls(1, 4), state="R")) == "computes or polls"
    assert said_of(rank(1, calls(1, 4)), cpu_s=2.9) == "computes or polls"


def test_lines_begin_with_the_communicator_in_which_ranks_wait() -> None:
    idle = [replace(calls(each, 3), key=1, name="a part") for each in range(2)]
    unused = [replace(calls(each, 0, ""), key=2, name="unused", since_ns=None) for each in range(2)]
    ranks = [rank(each, idle[each], unused[each], calls(each, 5 - each)) for each in range(2)]
    assert [(line.communicator, line.rank, line.number, line.waits_for) for line in look(ranks).lines()] == [
        ("world", 0, 5, "rank 1"),
        ("world", 1, 4, ""),
        ("a part", 0, 3, ""),
        ("a part", 1, 3, ""),
    ]


def test_a_call_on_a_gpu_may_be_only_enqueued() -> None:
    ranks = [rank(0, replace(calls(0, 5), on_gpu=True))]
    assert [line.does for line in look(ranks).lines()] == ["has enqueued it, and sleeps"]
