from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from mpicomm.devices.cuda.stream_threads import StreamThreads, ThreadsOfStreams
from tests.helpers.jobs.pace import HANG_S

OTHER = 7


def in_thread(act: Callable[[], Any]) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


@contextlib.contextmanager
def lasting() -> Iterator[Callable[[Callable[[], Any]], Any]]:
    """A thread that lives until the end of the ``with`` block, for which it makes calls."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda act: pool.submit(act).result(HANG_S)


@pytest.fixture
def streams() -> ThreadsOfStreams:
    return ThreadsOfStreams(lambda stream: stream < OTHER)


def test_a_thread_has_a_stream_to_itself_until_another_one_comes(streams: ThreadsOfStreams) -> None:
    streams.note(OTHER)
    streams.note(OTHER)
    assert not streams.of(OTHER).are_several
    in_thread(lambda: streams.note(OTHER))
    assert streams.of(OTHER).are_several
    streams.note(OTHER)
    assert streams.of(OTHER).are_several


def test_a_thread_that_has_ended_does_not_count(streams: ThreadsOfStreams) -> None:
    for _ in range(3):
        in_thread(lambda: streams.note(OTHER))
    streams.note(OTHER)
    assert not streams.of(OTHER).are_several


def test_each_thread_may_have_its_own_stream(streams: ThreadsOfStreams) -> None:
    streams.note(OTHER)
    with lasting() as thread:
        thread(lambda: streams.note(OTHER + 1))
    assert not streams.of(OTHER).are_several and not streams.of(OTHER + 1).are_several


def test_threads_with_their_own_streams_share_the_device_while_they_live(streams: ThreadsOfStreams) -> None:
    streams.note(OTHER)
    assert not streams.are_several
    with lasting() as thread:
        thread(lambda: streams.note(OTHER + 1))
        assert streams.are_several
    assert not streams.are_several
    with lasting() as thread:
        for _ in range(2):
            thread(lambda: streams.note(OTHER))  # the first stream has several users from here on
        assert streams.are_several
    assert not streams.are_several
    with lasting() as thread:
        thread(lambda: streams.note(OTHER))
        assert streams.are_several


def test_a_message_beside_another_thread_is_enqueued_before_mpi_is_told(streams: ThreadsOfStreams) -> None:
    enqueued: list[Any] = []
    streams.note(OTHER)
    with lasting() as thread:
        thread(lambda: streams.note(OTHER + 1))
        streams.of(OTHER).defer(enqueued.append, "copy")
        assert enqueued == ["copy"]


def test_streams_that_wait_for_each_other_count_as_one(streams: ThreadsOfStreams) -> None:
    streams.note(0)
    with lasting() as thread:
        thread(lambda: streams.note(3))
    assert streams.of(0).are_several and streams.of(3).are_several


def test_a_stream_that_captures_is_known_after_the_capture() -> None:
    captures = True
    streams = ThreadsOfStreams(lambda stream: None if captures else False)
    with lasting() as other:
        for _ in range(2):
            streams.note(OTHER)
            other(lambda: streams.note(OTHER))
            assert streams.of(OTHER).are_several == (not captures)
            captures = False


def test_another_thread_enqueues_deferred_work_before_its_own(streams: ThreadsOfStreams) -> None:
    enqueued: list[Any] = []
    streams.note(OTHER)
    threads = streams.of(OTHER)
    threads.defer(enqueued.append, "copy")
    assert enqueued == []

    def come() -> None:
        streams.note(OTHER)
        enqueued.append("wait")

    in_thread(come)
    assert enqueued == ["copy", "wait"]
    threads.flush()
    assert enqueued == ["copy", "wait"]
    assert not threads.cancel()


def test_a_single_thread_enqueues_deferred_work_late_or_not_at_all(streams: ThreadsOfStreams) -> None:
    enqueued: list[Any] = []
    streams.note(OTHER)
    threads = streams.of(OTHER)
    threads.defer(enqueued.append, "first")
    threads.flush()
    threads.defer(enqueued.append, "second")
    assert threads.cancel()
    threads.flush()
    assert enqueued == ["first"]


def test_several_threads_defer_nothing(streams: ThreadsOfStreams) -> None:
    enqueued: list[Any] = []
    streams.note(OTHER)
    in_thread(lambda: streams.note(OTHER))
    threads = streams.of(OTHER)
    threads.defer(enqueued.append, "copy")
    assert enqueued == ["copy"]
    threads.flush()
    assert enqueued == ["copy"]


def test_neither_thread_goes_on_while_the_other_one_enqueues() -> None:
    """Another thread comes while the first one enqueues: it must not pass, nor enqueue the same again."""
    threads = StreamThreads()
    enqueued: list[str] = []
    threads.join()

    def come() -> None:
        threads.join()
        enqueued.append("wait")

    other = threading.Thread(target=come)

    def enqueue() -> None:
        other.start()
        other.join(0.2)  # it would have passed
        enqueued.append("copy")

    threads.defer(enqueue)
    threads.flush()
    other.join(20)
    assert enqueued == ["copy", "wait"]


def test_a_thread_that_comes_between_the_look_and_the_debt_is_seen() -> None:
    """Another thread comes just before the first thread notes its debt. The first thread then enqueues it at once."""
    enqueued: list[str] = []

    class Late(StreamThreads):
        """Its second thread comes when the first one has looked whether there is one, and sees no debt yet."""

        looks: int

        def __getattribute__(self, name: str) -> Any:
            if name == "user":
                object.__setattr__(self, "looks", object.__getattribute__(self, "looks") + 1)
                if object.__getattribute__(self, "looks") == 2:
                    object.__setattr__(self, "user", -1)
            return object.__getattribute__(self, name)

    late = Late()
    late.looks = 0
    late.defer(enqueued.append, "copy")
    assert enqueued == ["copy"]


def test_what_cannot_be_enqueued_is_raised_by_the_thread_that_defers_it(streams: ThreadsOfStreams) -> None:
    def refuse() -> None:
        raise ValueError("no device")

    def come() -> None:
        with pytest.raises(ValueError, match="no device"):
            streams.note(OTHER)

    streams.note(OTHER)
    streams.of(OTHER).defer(refuse)
    in_thread(come)
    with pytest.raises(ValueError, match="no device"):
        streams.of(OTHER).flush()
