"""Pieces of work follow each other across streams, and say when they are done: on a device that is some lists."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="the order takes the driver's calls for captures from cuda-bindings")

STREAMS = (1, 2, 3)
_NOT_READY = 600


class Device:
    """Streams, and events that say how far one of them is to be. Each takes its own time."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._queues: dict[int, list[Callable[[], bool]]] = {stream: [] for stream in STREAMS}
        self._over = dict.fromkeys(STREAMS, 0)
        self._events: dict[int, tuple[int, int] | None] = {}  # those that there are
        self._made = 0
        self.carried_out: list[int] = []
        device = self

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                assert disable_timing
                device._made += 1
                self.ptr = device._made
                device._events[self.ptr] = None

            def __del__(self) -> None:
                device._events.pop(self.ptr)

        self.Event = Event

    def enqueue(self, stream: int, piece: int) -> None:
        """Enqueue a piece."""

        def carry_out() -> bool:
            self.carried_out.append(piece)
            return True

        self._queues[stream].append(carry_out)

    def end_of(self, stream: int) -> tuple[int, int]:
        """Return what is over when all that was enqueued there so far is done."""
        return stream, len(self._queues[stream])

    def is_over(self, place: tuple[int, int] | None) -> bool:
        return place is None or self._over[place[0]] >= place[1]

    def go_on(self, most: int) -> None:
        """Carry some of what is enqueued out, on any streams."""
        for _ in range(self.rng.randrange(most)):
            stream = self.rng.choice(STREAMS)
            queue, over = self._queues[stream], self._over[stream]
            if over < len(queue) and queue[over]():
                self._over[stream] += 1

    # ---- CUDA's

    def streamIsCapturing(self, stream: int) -> bool:
        return False

    def streamWaitEvent(self, stream: int, event: int) -> None:
        place = self._events[event]
        self._queues[stream].append(lambda: self.is_over(place))

    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self._events
        self._events[event] = self.end_of(stream)

    def cuEventQuery(self, event: int) -> tuple[int]:
        return (0 if self.is_over(self._events[event]) else _NOT_READY,)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture
def order(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = ["mpicomm.backend.cuda_completion", "mpicomm.backend.cuda_order"]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda = SimpleNamespace(Event=device.Event, runtime=device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    flags = SimpleNamespace(CU_EVENT_DISABLE_TIMING=2)
    driver = SimpleNamespace(
        CUevent_flags=flags,
        cuEventCreate=_event_create,
        cuEventDestroy=_event_destroy,
        cuEventQuery=device.cuEventQuery,
    )
    modules = [importlib.import_module(name) for name in names]
    for module in modules:
        monkeypatch.setattr(module, "driver", driver)
    order = modules[1].StreamOrder()
    yield order
    order.close()
    for name in names:
        del sys.modules[name]  # what was there before comes back


def _event_create(flags: int) -> tuple[int, int]:
    return 0, 1 << 40


def _event_destroy(event: int) -> tuple[int]:
    return (0,)


@pytest.mark.parametrize("device", range(50), indirect=True)
def test_pieces_follow_each_other_and_say_when_they_are_done(device: Device, order: Any) -> None:
    rng = device.rng
    pending: list[tuple[tuple[int, int], Callable[[], bool]]] = []
    for piece in range(60):
        stream = rng.choice(STREAMS)
        assert order.enqueue(stream, lambda stream, piece=piece: device.enqueue(stream, piece), None)
        place = device.end_of(stream)
        if rng.random() < 0.5:
            pending.append((place, order.completion()))
        if pending and rng.random() < 0.1:
            # Nobody wants to know, and the next piece waits for it all the same.
            pending.pop(rng.randrange(len(pending)))
        device.go_on(6)
        for each in list(pending):
            place, done = each
            assert done() == device.is_over(place)
            if device.is_over(place):  # and is not asked again
                pending.remove(each)
    assert device.carried_out == list(range(len(device.carried_out)))
    assert len(device.carried_out) > 5
