"""Marks of streams: their events are used again, and live as long as the marks."""

from __future__ import annotations

import gc
import importlib
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda

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
