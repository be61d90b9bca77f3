"""Pieces of work follow each other across streams, and tell when they are done; threads that share a stream."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from mpicomm.devices.cuda.stream_threads import StreamThreads, ThreadsOfStreams
from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda, Place
from tests.helpers.jobs.pace import HANG_S

STREAMS = (1, 2, 3, 4)


@pytest.fixture
def order(cuda: FakeCuda) -> Iterator[Any]:
    """An order in which two of the streams are lasting."""
    order = importlib.import_module("mpicomm.devices.cuda.stream_order").StreamOrder(nullcontext, {0, 1, 2})
    yield order
    order.close()


@pytest.mark.parametrize("cuda", range(50), indirect=True)
@pytest.mark.parametrize("own", [False, True])
def test_pieces_follow_each_other_and_say_when_they_are_done(cuda: FakeCuda, order: Any, own: bool) -> None:
    """An event of the caller may come again at any time; the caller may drop one for which the next piece waits."""
    new = importlib.import_module("mpicomm.devices.cuda.events").LocalEvent if own else order.completions.acquire
    carried_out: list[int] = []
    pending: list[tuple[Place, Any]] = []
    idle: list[Any] = []
    for piece in range(60):
        stream = cuda.rng.choice(STREAMS)
        event = (idle.pop() if idle else new()) if cuda.rng.random() < 0.6 else None
        assert order.enqueue(stream, partial(cuda.enqueue, act=partial(carried_out.append, piece)), None, event)
        if event is not None:
            pending.append((cuda.end_of(stream), event))
        dropped = idle if own else pending
        if dropped and cuda.rng.random() < 0.1:
            dropped.pop(cuda.rng.randrange(len(dropped)))
        cuda.go_on()
        for place, event in pending:
            assert (cuda.cuEventQuery(event.ptr) == (0,) if own else event.is_done()) == cuda.is_over(place)
        while own and pending and cuda.rng.random() < 0.6:
            idle.append(pending.pop()[1])  # often the event for which the next piece waits
        if not own:
            pending = [each for each in pending if not cuda.is_over(each[0])]  # no caller comes again
    cuda.finish()
    assert carried_out == list(range(60))


def test_a_piece_of_a_capture_does_not_record_the_event_of_the_caller(cuda: FakeCuda, order: Any) -> None:
    event = importlib.import_module("mpicomm.devices.cuda.events").LocalEvent()
    cuda.captures = {2: 7}
    assert not order.enqueue(2, None, partial(cuda.enqueue, act=int), event)
    assert cuda.events[event.ptr] is None


@pytest.mark.parametrize(("stream", "waits"), [(0, 0), (1, 0), (3, 2)])
def test_only_a_stream_that_may_be_another_one_waits_for_itself(
    cuda: FakeCuda, order: Any, monkeypatch: pytest.MonkeyPatch, stream: int, waits: int
) -> None:
    order.enqueue(stream, partial(cuda.enqueue, act=int), None)
    waited: list[int] = []
    monkeypatch.setattr(cuda, "streamWaitEvent", lambda stream, event: waited.append(stream))
    for _ in range(2):
        order.enqueue(stream, partial(cuda.enqueue, act=int), None)
    assert len(waited) == waits
    order.enqueue(4, partial(cuda.enqueue, act=int), None)
    assert waited[waits:] == [4]


@pytest.mark.parametrize("cuda", range(10), indirect=True)
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("where", ["launch", "record"])
def test_pieces_follow_one_that_was_interrupted(cuda: FakeCuda, order: Any, captures: bool, where: str) -> None:
    if captures:
        cuda.captures = dict.fromkeys(STREAMS, 7)
    carried_out: list[int] = []
    for piece in range(30):
        interruption = cuda.rng.choice([KeyboardInterrupt(), ValueError(), None])

        def enqueue(stream: int, piece: int = piece, interruption: BaseException | None = interruption) -> None:
            cuda.enqueue(stream, partial(carried_out.append, piece))
            if interruption is not None and where == "launch":
                raise interruption
            if interruption is not None:
                cuda.interrupts["cuEventRecord" if captures else "eventRecord"] = interruption

        try:
            assert order.enqueue(cuda.rng.choice(STREAMS), enqueue, enqueue) is not captures
        except (KeyboardInterrupt, ValueError) as error:
            assert error is interruption
        else:
            assert interruption is None
        cuda.go_on()
    cuda.finish()
    assert carried_out == list(range(30))


@pytest.mark.parametrize("captures", [False, True])
def test_the_first_interrupt_goes_on(cuda: FakeCuda, order: Any, captures: bool) -> None:
    """A failed device, or an invalid capture, refuses to record, too."""
    refusal = HandleError if captures else cuda.CUDARuntimeError
    cuda.refuses["cuEventRecord" if captures else "eventRecord"] = refusal
    if captures:
        cuda.captures = dict.fromkeys(STREAMS, 7)

    def interrupt(stream: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        order.enqueue(1, interrupt, interrupt)
    with pytest.raises(refusal):
        order.enqueue(1, *[lambda stream: None] * 2)


@pytest.mark.parametrize("cuda", range(20), indirect=True)
def test_pieces_of_captures_that_take_turns_follow_each_other(cuda: FakeCuda, order: Any) -> None:
    cuda.captures = {stream: stream % 2 for stream in STREAMS}
    pieces: list[list[int]] = [[], []]
    carried_out: list[list[int]] = [[], []]
    for piece in range(60):
        stream = cuda.rng.choice(STREAMS)
        capture = cuda.captures[stream]
        pieces[capture].append(piece)
        assert not order.enqueue(stream, None, partial(cuda.enqueue, act=partial(carried_out[capture].append, piece)))
        cuda.go_on()
    cuda.finish()
    assert carried_out == pieces


def test_captures_that_are_over_leave_few_events(cuda: FakeCuda, order: Any) -> None:
    for capture in range(100):
        cuda.captures = dict.fromkeys(STREAMS, capture)
        for stream in STREAMS:
            order.enqueue(stream, None, lambda stream: None)
    assert len(cuda.events) < 20


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
        in_thread(lambda: streams.add_user(OTHER))  # it has ended
    for _ in range(2):
        streams.add_user(OTHER)
    assert not streams.of(OTHER).is_shared and not streams.is_shared
    with lasting() as thread:
        thread(lambda: streams.add_user(OTHER + 1))
        assert not streams.of(OTHER).is_shared and not streams.of(OTHER + 1).is_shared
        assert streams.is_shared
        enqueued: list[str] = []
        streams.of(OTHER).defer(enqueued.append, "copy")
        assert enqueued == ["copy"], "beside another thread a message is enqueued before MPI is told"
    assert not streams.is_shared
    for _ in range(2):  # from the first time on the stream has had several users
        with lasting() as thread:
            thread(lambda: streams.add_user(OTHER))
            assert streams.is_shared and streams.of(OTHER).is_shared
        streams.add_user(OTHER)
        assert not streams.is_shared and streams.of(OTHER).is_shared


def test_streams_that_wait_for_each_other_count_as_one(streams: ThreadsOfStreams) -> None:
    streams.add_user(0)
    with lasting() as thread:
        thread(lambda: streams.add_user(3))
    assert streams.of(0).is_shared and streams.of(3).is_shared


def test_a_stream_that_captures_is_known_after_the_capture() -> None:
    captures = True
    streams = ThreadsOfStreams(lambda stream: None if captures else False)
    with lasting() as other:
        for _ in range(2):
            streams.add_user(OTHER)
            other(lambda: streams.add_user(OTHER))
            assert streams.of(OTHER).is_shared == (not captures)
            captures = False


def test_deferred_work_is_enqueued_once_and_before_the_work_of_another_thread(streams: ThreadsOfStreams) -> None:
    enqueued: list[str] = []
    streams.add_user(OTHER)
    threads = streams.of(OTHER)
    threads.defer(enqueued.append, "first")
    assert enqueued == []
    threads.flush()
    threads.flush()
    threads.defer(enqueued.append, "copy")
    assert enqueued == ["first"]

    def come() -> None:
        streams.add_user(OTHER)
        enqueued.append("wait")

    in_thread(come)
    threads.flush()
    assert enqueued == ["first", "copy", "wait"]
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
            streams.add_user(OTHER)

    streams.add_user(OTHER)
    streams.of(OTHER).defer(refuse)
    in_thread(come)
    with pytest.raises(ValueError, match="no device"):
        streams.of(OTHER).flush()
