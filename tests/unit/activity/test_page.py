"""The page that a process writes about itself, as another process reads it."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from mpicomm.activity import layout
from mpicomm.activity import page as activity_page
from mpicomm.activity.layout import ranks_as_text, ranks_of_text
from mpicomm.activity.page import CommunicatorRow, Member, RowHeader, begin_mpi_call, mpi_call_number, page, read_text
from mpicomm.activity.reading import Activity, BlockedMessage, OtherVersionError, RankCalls, read_activity, read_calls
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.kernels.window import WINDOW_RANKS

ALONE = [Member("host", 1, 0)]


def opened(processes: list[Member], rank: int = 0) -> CommunicatorRow:
    row = CommunicatorRow()
    row_header = RowHeader(rank, processes, "cpu")
    row.publish(row_header, row_header.next_number())
    return row


def read() -> Activity:
    found = read_activity(os.getpid())
    assert found is not None
    return found


def of(name: str) -> RankCalls:
    """The only communicator of that name."""
    (found,) = [calls for calls in read().communicators if calls.name == name]
    return found


def test_calls_have_numbers_and_texts() -> None:
    row = opened([Member("host", 1, 41), Member("host", 2, 42), Member("other", 1, 50)], 1)
    before = of("ranks 41-42,50")
    assert (before.rank, before.size, before.made, before.last) == (1, 3, 0, "")
    row.log(0).post("Allreduce(float32)")
    posted = of("ranks 41-42,50")
    assert (posted.made, posted.last, posted.since_ns is not None) == (1, "Allreduce(float32)", True)
    for count in (5, 6):
        row.log(0).post(f"Scan(int8, count={layout.COUNT_IN_TEXT}, op=sum)", count)
        assert of("ranks 41-42,50").last == f"Scan(int8, count={count}, op=sum)"
    text = f"Bcast(count={layout.COUNT_IN_TEXT}), into byte {layout.OFFSET_IN_TEXT}"
    for offset in (9, 0):
        row.log(0).post(text, 5, offset)
        assert of("ranks 41-42,50").last == f"Bcast(count=5), into byte {offset}"
    begin_mpi_call(row.words, mpi_call_number("Bcast"))
    last = of("ranks 41-42,50")
    assert (last.made, last.last, last.since_ns) == (6, "Bcast", None)
    row.hide()
    assert "ranks 41-42,50" not in {calls.name for calls in read().communicators}


def test_windows_have_rows_of_their_own() -> None:
    assert layout.MAX_WINDOW_RANKS == WINDOW_RANKS
    row_header = RowHeader(0, [Member("host", 1, 61), Member("host", 2, 62)], "cpu")
    communicator, row = CommunicatorRow(), CommunicatorRow()
    communicator.publish(row_header, 1)
    row.publish(row_header, 1, window=True)
    assert of("ranks 61-62").key != of("window of ranks 61-62").key
    row.log(0).post("Win.Fence")
    posted = of("window of ranks 61-62")
    assert (posted.made, posted.last, of("ranks 61-62").completed) == (1, "Win.Fence", b"")
    for times, counts in ((255, layout.POSTED), (258, layout.COMPLETED)):
        for _ in range(times):
            row.count(counts, 0b10)
    assert (row.posted(0), row.posted(1)) == (0, 255)
    assert of("window of ranks 61-62").completed == bytes([0, 2]) + bytes(layout.MAX_WINDOW_RANKS - 2)
    row.hide()
    communicator.hide()


def test_a_call_by_mpi_leaves_the_last_other_call() -> None:
    row = opened([Member("host", 1, 63)])
    begin_mpi_call(row.words, mpi_call_number("Barrier"))
    assert of("rank 63").last_post == ""
    row.log(0).post(f"Bcast(count={layout.COUNT_IN_TEXT})", 3)
    begin_mpi_call(row.words, mpi_call_number("Barrier"))
    found = read_calls(os.getpid(), of("rank 63").key)
    assert found == of("rank 63")
    assert (found.made, found.by_mpi, found.last, found.last_post) == (3, 2, "Barrier", "Bcast(count=3)")
    assert read_calls(os.getpid(), 1) is None and read_calls(1 << 30, found.key) is None
    for name in (*OPERATIONS, "Unheard_of"):
        begin_mpi_call(row.words, mpi_call_number(name))
        assert of("rank 63").last == name


def test_the_last_call_is_that_of_the_log_that_was_used_last() -> None:
    row = opened([Member("host", 1, 65)])
    for index, text in ((1, "in the node"), (0, "in the domain"), (0, "in the domain"), (1, "again")):
        row.log(index).post(text)
        found = of("rank 65")
        assert (found.last, found.last_post) == (text, text)
    begin_mpi_call(row.words, mpi_call_number("Bcast"))
    assert (of("rank 65").made, of("rank 65").last_post) == (5, "again")


def test_communicators_of_the_same_ranks_have_different_names_keys_and_messages() -> None:
    first, second = opened([Member("host", 1, 44)]), opened([Member("host", 1, 44)])
    words = second.words
    words[layout.RECEIVES], words[layout.TAG], words[layout.SOURCE] = 3, -1, -2
    assert of("rank 44").key != of("rank 44 #2").key
    assert (of("rank 44").messages, of("rank 44 #2").messages) == ((), (BlockedMessage("receive", -2, -1, 3),))
    del first


def test_a_row_is_given_back_when_nothing_refers_to_it() -> None:
    for _ in range(3 * layout.ROWS):
        row = opened([Member("host", 1, 47)])
    name = f"rank 47 #{3 * layout.ROWS}"
    row.log(0).post("Barrier")
    assert of(name).last == "Barrier"
    del row
    gc.collect()
    assert name not in {calls.name for calls in read().communicators}


def test_more_communicators_than_rows_are_not_shown_and_do_no_harm() -> None:
    rows = [opened([Member("host", 1, 48)]) for _ in range(layout.ROWS + 5)]
    for row in rows:
        row.log(0).post("Barrier")
    assert len(read().communicators) == layout.ROWS
    shared, words = rows[-1].log(0).export(), rows[-1].log(0).words
    assert shared.content is not None and shared.content[: layout.LOG_NBYTES].tobytes() == words.tobytes()
    shared.close()
    del rows, words


def test_texts_that_others_have_taken_the_place_of_are_not_shown() -> None:
    idle, busy = opened([Member("host", 1, 49)]), opened([Member("host", 1, 60)])
    idle.log(0).post("Scan(int8)")
    for number in range(3 * layout.TEXTS):
        busy.log(0).post(f"{number} {'x' * 2000}")
        if number % 50 == 0:
            assert of("rank 60").last == f"{number} {'x' * 2000}"[: layout.TEXT_NBYTES - 9]
    assert (of("rank 49").made, of("rank 49").last) == (1, "")
    for text in ("Scan(int16)", "Scan(int8)"):
        idle.log(0).post(text)
        assert of("rank 49").last == text


def at_fence(monkeypatch: pytest.MonkeyPatch, which: int, meet: Callable[[], object]) -> None:
    """Call ``meet`` at the fence number ``which`` from now on, in the place of another process."""
    fences = iter(range(9))

    def fence() -> None:
        if next(fences) == which:
            monkeypatch.setattr(activity_page, "fence", lambda: None)
            meet()

    monkeypatch.setattr(activity_page, "fence", fence)


def overwrite(times: int) -> None:
    for number in range(times):
        page().write_text(f"new {number}")


@pytest.mark.parametrize("fence", [0, 1])
def test_a_text_that_is_overwritten_while_a_peer_reads_it_is_not_taken(
    monkeypatch: pytest.MonkeyPatch, fence: int
) -> None:
    texts = page().bytes[layout.TEXTS_AT :]
    number = page().write_text("old")
    at_fence(monkeypatch, fence, lambda: overwrite(layout.TEXTS))  # of the reader
    assert read_text(texts, number) is None
    monkeypatch.undo()
    number = page().write_text("old")
    overwrite(layout.TEXTS - 1)
    assert read_text(texts, number) == "old"
    taken: list[str | None] = []
    at_fence(monkeypatch, fence, lambda: taken.append(read_text(texts, number)))  # of the writer
    page().write_text("the text in its place")
    assert taken == [None]


def test_steps_are_nested_and_all_ranks_of_the_world_are_the_world() -> None:
    page().set_world(3, 9)
    with page().step("outer", "0-3,8,?"):
        with page().step("inner", "0-1"):
            inner = read()
        outer = read()
    assert (inner.step and inner.step.text, outer.step and outer.step.text) == ("inner", "outer")
    assert outer.step is not None and outer.step.world_ranks == (0, 1, 2, 3, 8, -1)
    assert (outer.world_rank, read().step) == (3, None)
    page().set_world(0, 1)
    row = opened(ALONE)
    assert any(calls.name.startswith("world") for calls in read().communicators)
    row.hide()


@pytest.mark.parametrize(
    ("ranks", "text"), [([], ""), ([3], "3"), ([0, 1, 2, 5, 4], "0-2,5,4"), ([-7, -7, 0], "?,?,0")]
)
def test_ranks_as_text(ranks: list[int], text: str) -> None:
    assert ranks_as_text(ranks) == text
    assert ranks_of_text(text) == tuple(max(rank, -1) for rank in ranks)


def test_ranks_of_another_process_are_bounded() -> None:
    assert len(ranks_of_text("0-99999999999999999999")) == 1 << 20


def test_a_row_with_impossible_ranks_is_not_shown() -> None:
    row = opened([Member("host", 1, 67)])
    assert of("rank 67").size == 1
    for rank, size in ((-1, 1), (1, 1), (2, 1), (0, 0), (0, (1 << 24) + 1)):
        row.words[layout.RANK], row.words[layout.SIZE] = rank, size
        assert "rank 67" not in {calls.name for calls in read().communicators}


def test_a_page_of_another_version() -> None:
    program = (
        f"import os; fd = os.memfd_create({layout.MEMORY_NAME!r}); os.ftruncate(fd, 8192); print(flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(OtherVersionError):
            read_activity(other.pid)
        other.kill()


@pytest.mark.parametrize("reads", [1, 2, 5, 30])
def test_a_page_that_its_process_truncates_while_it_is_read(monkeypatch: pytest.MonkeyPatch, reads: int) -> None:
    row = opened([Member("host", 1, 66)])
    row.log(0).post("Barrier")
    memory = os.memfd_create(layout.MEMORY_NAME)
    os.pwrite(memory, page().bytes, 0)
    with subprocess.Popen(["sleep", "60"], pass_fds=[memory]) as other:
        pread, whole = os.pread, iter(range(reads))

        def read_and_truncate(*given: int) -> bytes:
            if next(whole, None) is None:
                os.ftruncate(memory, 0)
            return pread(*given)

        monkeypatch.setattr(os, "pread", read_and_truncate)
        try:
            found = read_activity(other.pid)
        finally:
            other.kill()
    os.close(memory)
    row.hide()
    assert found is not None
    assert all(calls.last in ("", "Barrier") for calls in found.communicators)


def test_the_descriptor_is_not_inherited() -> None:
    page()
    with subprocess.Popen(["sleep", "60"]) as other:
        assert read_activity(other.pid) is None
        other.kill()
