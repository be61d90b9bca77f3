"""Events are destroyed in their context, on any thread; those of marks are used again, and live as long as these."""

from __future__ import annotations

import gc
import importlib
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda

MINE, OTHER = 7, 8


@pytest.fixture
def make(cuda: FakeCuda) -> Callable[[], Any]:
    cuda.ctxSetCurrent(MINE)
    event: Callable[[], Any] = importlib.import_module("mpicomm.devices.cuda.events").LocalEvent
    return event


@pytest.mark.parametrize("own", [0, MINE, OTHER])
def test_it_is_destroyed_in_its_context_wherever_it_is_collected(
    cuda: FakeCuda, make: Callable[[], Any], own: int
) -> None:
    after = []

    def run() -> None:
        cuda.ctxSetCurrent(own)
        gc.collect()
        after.append(cuda.ctxGetCurrent())

    gc.disable()  # or another thread of the tests collects first
    try:
        garbage = [make()]
        garbage.append(garbage)
        del garbage
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        gc.enable()
    assert (cuda.destroyed_in, after) == ([MINE], [own])


def test_it_is_destroyed_with_its_last_reference_and_quietly_when_cuda_is_over(
    cuda: FakeCuda, make: Callable[[], Any]
) -> None:
    event = make()
    assert [*cuda.events] == [event.ptr]
    assert cuda.destroyed_in == []
    del event
    assert cuda.destroyed_in == [MINE]
    event = make()
    cuda.refuses["eventCreateWithFlags"] = cuda.CUDARuntimeError
    with pytest.raises(cuda.CUDARuntimeError):
        make()
    cuda.refuses["ctxGetCurrent"] = cuda.CUDADriverError
    del event  # Python cannot raise an exception of __del__; pytest makes it an error
    assert cuda.destroyed_in == [MINE]


STREAM = 7


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
    side_streams.follow(STREAM + 1, mark)
    del mark
    assert not cuda.events
