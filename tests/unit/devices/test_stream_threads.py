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


def test_living_threads_of_one_stream_and_of_the_device_count(streams: ThreadsOfStreams) -> None:
    for _ in range(3):
        in_thread(lambda: streams.note(OTHER))  # it has ended
    for _ in range(2):
        streams.note(OTHER)
    assert not streams.of(OTHER).are_several and not streams.are_several
    with lasting() as thread:
        thread(lambda: streams.note(OTHER + 1))
        assert not streams.of(OTHER).are_several and not streams.of(OTHER + 1).are_several
        assert streams.are_several
        enqueued: list[str] = []
        streams.of(OTHER).defer(enqueued.append, "copy")
        assert enqueued == ["copy"], "beside another thread a message is enqueued before MPI is told"
    assert not streams.are_several
    for _ in range(2):  # from the first time on the stream has had several users
        with lasting() as thread:
            thread(lambda: streams.note(OTHER))
            assert streams.are_several and streams.of(OTHER).are_several
        streams.note(OTHER)
        assert not streams.are_several and streams.of(OTHER).are_several


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


def test_deferred_work_is_enqueued_once_and_before_the_work_of_another_thread(streams: ThreadsOfStreams) -> None:
    enqueued: list[str] = []
    streams.note(OTHER)
    threads = streams.of(OTHER)
    threads.defer(enqueued.append, "first")
    assert enqueued == []
    threads.flush()
    threads.defer(enqueued.append, "dropped")
    assert threads.cancel()
    threads.flush()
    threads.defer(enqueued.append, "copy")
    assert enqueued == ["first"]

    def come() -> None:
        streams.note(OTHER)
        enqueued.append("wait")

    in_thread(come)
    threads.flush()
    assert enqueued == ["first", "copy", "wait"] and not threads.cancel()
    threads.defer(enqueued.append, "at once")  # several threads defer nothing
    threads.flush()
    assert enqueued[3:] == ["at once"]


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
