"""When the work of streams began and ended, by the host's clock, which is ahead of the device's by `AHEAD_US`; events.

Events are destroyed in their context, on any thread. Those of marks are used again, and live as long as these.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda

AHEAD_US = 5_000_000
STREAM, OTHER = 1, 2


@pytest.fixture
def make(cuda: FakeCuda) -> Callable[[], Any]:
    backend = SimpleNamespace(loading=contextlib.nullcontext, current=contextlib.nullcontext)
    timeline = importlib.import_module("mpicomm.devices.cuda.timeline").Timeline
    return lambda: timeline(backend, lambda: (AHEAD_US + cuda.now_us) * 1000)


def work(cuda: FakeCuda, stream: int, pieces: int) -> None:
    for _ in range(pieces):
        cuda.enqueue(stream, lambda: None)


def by_host(begin_us: int, end_us: int) -> tuple[int, int]:
    return (AHEAD_US + begin_us) * 1000, (AHEAD_US + end_us) * 1000


def test_an_interval_is_the_work_between_its_begin_and_its_last_end(cuda: FakeCuda, make: Callable[[], Any]) -> None:
    timeline = make()
    work(cuda, STREAM, 3)
    interval = timeline.begin(STREAM)
    for pieces in (2, 5):  # of the two ends the later one counts
        work(cuda, STREAM, pieces)
        interval.extend()
    work(cuda, STREAM, 1)
    assert interval.times_ns() is None
    assert not cuda.is_over(cuda.end_of(STREAM)) and "cuStreamSynchronize" not in cuda.calls, "nothing waits for it"
    cuda.finish()
    assert interval.times_ns() == by_host(3, 10)


def test_the_clocks_are_compared_again_if_the_devices_clock_drifts(cuda: FakeCuda, make: Callable[[], Any]) -> None:
    timeline = make()
    cuda.now_us += 2_000_000  # both clocks go on
    cuda._times_us.update({event: when + 300 for event, when in cuda._times_us.items()})  # one has gone slower
    interval = timeline.begin(STREAM)
    work(cuda, STREAM, 4)
    interval.extend()
    cuda.finish()
    assert interval.times_ns() == by_host(2_000_000, 2_000_004)


def test_the_last_comparison_stays_if_other_work_delays_the_next(cuda: FakeCuda, make: Callable[[], Any]) -> None:
    timeline = make()
    (own,) = cuda.streams
    cuda.now_us += 2_000_000
    work(cuda, own, 1)
    answers = iter(range(10**9))
    timeline._now_ns = lambda: (AHEAD_US + cuda.now_us) * 1000 + 1000 * next(answers)  # time goes by while it waits
    interval = timeline.begin(STREAM)
    assert next(answers) < 3000  # a millisecond
    interval.extend()
    assert interval.times_ns() == by_host(2_000_000, 2_000_000)


def test_an_event_that_comes_late_is_compared_by_the_answers_around_it(
    cuda: FakeCuda, make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    query, record, left = cuda.cuEventQuery, cuda.eventRecord, 0

    def record_and_delay(event: int, stream: int) -> None:
        nonlocal left
        work(cuda, stream, 1)
        record(event, stream)
        left = 1000

    def answer_later(event: int) -> tuple[int]:
        nonlocal left
        left -= 1
        cuda.now_us += 2  # the time of a query
        if left == 0:
            cuda.finish()
        return query(event)

    monkeypatch.setattr(cuda, "eventRecord", record_and_delay)
    monkeypatch.setattr(cuda, "cuEventQuery", answer_later)
    timeline = make()
    monkeypatch.undo()
    interval = timeline.begin(STREAM)
    work(cuda, STREAM, 4)
    interval.extend()
    begin_us = cuda.now_us
    cuda.finish()
    (start_ns, stop_ns), (expected_ns, _) = interval.times_ns(), by_host(begin_us, 0)
    assert abs(start_ns - expected_ns) <= 5_000 and stop_ns - start_ns == 4_000


def test_work_of_a_capture_has_no_time_and_events_are_used_again(cuda: FakeCuda, make: Callable[[], Any]) -> None:
    timeline = make()
    cuda.captures[STREAM] = 7
    assert timeline.begin(STREAM) is None
    events: set[int] = set()
    for _ in range(100):
        interval = timeline.begin(OTHER)
        interval.extend()
        assert interval.times_ns() is not None
        events |= {interval.start.ptr, interval.stop.ptr}
    assert len(events) == 2
    assert cuda.captures == {STREAM: 7} and not cuda.invalid


def test_a_device_that_has_failed_has_no_times(cuda: FakeCuda, make: Callable[[], Any]) -> None:
    timeline = make()
    interval = timeline.begin(STREAM)
    cuda.refuses["eventRecord"] = cuda.CUDARuntimeError
    assert timeline.begin(STREAM) is None
    interval.extend()  # the call raises the error
    cuda.refuses["eventElapsedTime"] = cuda.CUDARuntimeError
    with pytest.raises(HandleError, match="the times of a stream cannot be measured"):
        interval.times_ns()


MINE, ELSEWHERE = 7, 8


@pytest.fixture
def event_of(cuda: FakeCuda) -> Callable[[], Any]:
    cuda.ctxSetCurrent(MINE)
    event: Callable[[], Any] = importlib.import_module("mpicomm.devices.cuda.events").LocalEvent
    return event


@pytest.mark.parametrize("own", [0, MINE, ELSEWHERE])
def test_it_is_destroyed_in_its_context_wherever_it_is_collected(
    cuda: FakeCuda, event_of: Callable[[], Any], own: int
) -> None:
    after = []

    def run() -> None:
        cuda.ctxSetCurrent(own)
        gc.collect()
        after.append(cuda.ctxGetCurrent())

    gc.disable()  # or another thread of the tests collects first
    try:
        garbage = [event_of()]
        garbage.append(garbage)
        del garbage
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        gc.enable()
    assert (cuda.destroyed_in, after) == ([MINE], [own])


def test_it_is_destroyed_with_its_last_reference_and_quietly_when_cuda_is_over(
    cuda: FakeCuda, event_of: Callable[[], Any]
) -> None:
    event = event_of()
    assert [*cuda.events] == [event.ptr]
    assert cuda.destroyed_in == []
    del event
    assert cuda.destroyed_in == [MINE]
    event = event_of()
    cuda.refuses["eventCreateWithFlags"] = cuda.CUDARuntimeError
    with pytest.raises(cuda.CUDARuntimeError):
        event_of()
    cuda.refuses["ctxGetCurrent"] = cuda.CUDADriverError
    del event  # Python cannot raise an exception of __del__; pytest makes it an error
    assert cuda.destroyed_in == [MINE]


@pytest.fixture
def side_streams(context: Any) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.side_streams").SideStreams(context)


def test_an_event_is_used_again_after_its_mark_is_gone(cuda: FakeCuda, side_streams: Any) -> None:
    first, second = side_streams.mark(STREAM), side_streams.mark(STREAM)
    event = first.ptr
    del first
    assert side_streams.mark(STREAM).ptr == event
    assert second.ptr != event
    assert len(cuda.events) == 2


def test_an_event_of_a_mark_in_a_cycle_of_garbage_is_not_destroyed(cuda: FakeCuda, side_streams: Any) -> None:
    cycle: list[Any] = [side_streams.mark(STREAM)]
    event = cycle[0].ptr
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert event in cuda.events
    assert side_streams.mark(STREAM).ptr == event


def test_a_mark_keeps_its_event_after_the_streams_are_closed(cuda: FakeCuda, side_streams: Any) -> None:
    mark = side_streams.mark(STREAM)
    side_streams.mark(STREAM)
    for _ in range(2):
        side_streams.close()
    assert list(cuda.events) == [mark.ptr]
    side_streams.wait_event(STREAM + 1, mark)
    del mark
    assert not cuda.events
