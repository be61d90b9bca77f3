"""Pieces of work follow each other across streams, and tell when they are done: on a device made of lists."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.errors import HandleError

pytest.importorskip("cuda.bindings", reason="the order takes the driver's calls for captures from cuda-bindings")

from mpicomm.devices.cuda import capture as cuda_capture

STREAMS = (1, 2, 3, 4)
_NOT_READY = 600


class CUDARuntimeError(RuntimeError):
    pass


class Device:
    """Streams, and events that say how far one of them is to be. Each takes its own time.

    What a stream captures it carries out all the same, as if a graph of it had been launched at once.
    """

    CUDARuntimeError = CUDARuntimeError

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._queues: dict[int, list[Callable[[], bool]]] = {stream: [] for stream in STREAMS}
        self._over = dict.fromkeys(STREAMS, 0)
        self._events: dict[int, tuple[int, int] | None] = {}  # the events that exist
        self._made = 0
        self.eventDisableTiming = 2
        self._recorded_in: dict[int, int | None] = {}
        self.captures: dict[int, int] = {}
        """Which streams take part in which captures."""
        self.interrupts: list[BaseException] = []
        """The errors that the next calls raise when they have done their work."""
        self.refuses: type[Exception] | None = None
        """The error of all calls that record, as on a failed device or in an invalid capture."""
        self.carried_out: list[int] = []

    def enqueue(self, stream: int, piece: int) -> None:
        """Enqueue a piece."""

        def carry_out() -> bool:
            self.carried_out.append(piece)
            return True

        self._queues[stream].append(carry_out)
        self._interrupt()

    def end_of(self, stream: int) -> tuple[int, int]:
        """Return what is over when all that was enqueued there so far is done."""
        return stream, len(self._queues[stream])

    def is_over(self, place: tuple[int, int] | None) -> bool:
        return place is None or self._over[place[0]] >= place[1]

    def go_on(self, most: int) -> None:
        """Carry out some of the enqueued work, on any streams."""
        for _ in range(self.rng.randrange(most)):
            stream = self.rng.choice(STREAMS)
            queue, over = self._queues[stream], self._over[stream]
            if over < len(queue) and queue[over]():
                self._over[stream] += 1

    # ---- CUDA's

    CUDADriverError = CUDARuntimeError

    def ctxGetCurrent(self) -> int:
        return 1

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == self.eventDisableTiming
        self._made += 1
        self._events[self._made] = None
        return self._made

    def eventDestroy(self, event: int) -> None:
        self._events.pop(event)

    def streamIsCapturing(self, stream: int) -> bool:
        return stream in self.captures

    def streamWaitEvent(self, stream: int, event: int) -> None:
        place, capture = self._events[event], self.captures.get(stream)
        assert place is None or capture == self._recorded_in[event]
        self._queues[stream].append(lambda: self.is_over(place))

    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self._events
        if self.refuses is not None:
            raise self.refuses("this cannot be recorded")
        self._events[event] = self.end_of(stream)
        self._recorded_in[event] = self.captures.get(stream)
        self._interrupt()

    def cuEventQuery(self, event: int) -> tuple[int]:
        return (0 if self.is_over(self._events[event]) else _NOT_READY,)

    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.eventRecord(event, stream)
        return (0,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        self.streamWaitEvent(stream, event)
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, int, int]:
        return 0, 1, self.captures[stream]

    def _interrupt(self) -> None:
        if self.interrupts:
            raise self.interrupts.pop(0)


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Device:
    return Device(request.param)


@pytest.fixture
def order(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = [f"mpicomm.devices.cuda.{name}" for name in ("local_event", "completion", "stream_order")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda = SimpleNamespace(driver=device, runtime=device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    modules = [importlib.import_module(name) for name in names]
    for module in (cuda_capture, *modules[1:]):
        monkeypatch.setattr(module, "driver", device)
    order = modules[-1].StreamOrder()
    yield order
    order.close()
    for name in names:
        del sys.modules[name]  # what was there before comes back


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
            # The caller drops the function; the next piece waits for the event all the same.
            pending.pop(rng.randrange(len(pending)))
        device.go_on(6)
        for each in list(pending):
            place, done = each
            assert done() == device.is_over(place)
            if device.is_over(place):  # nobody calls it again
                pending.remove(each)
    assert device.carried_out == list(range(len(device.carried_out)))
    assert len(device.carried_out) > 5


@pytest.mark.parametrize("device", range(10), indirect=True)
@pytest.mark.parametrize("captures", [False, True])
@pytest.mark.parametrize("where", ["launch", "record"])
def test_pieces_follow_one_that_was_interrupted(device: Device, order: Any, captures: bool, where: str) -> None:
    if captures:
        device.captures = dict.fromkeys(STREAMS, 7)
    for piece in range(30):
        interruption = device.rng.choice([KeyboardInterrupt(), ValueError(), None])

        def enqueue(stream: int, piece: int = piece, interruption: BaseException | None = interruption) -> None:
            if where == "launch" and interruption is not None:
                device.interrupts = [interruption]
            device.enqueue(stream, piece)
            if where == "record" and interruption is not None:
                device.interrupts = [interruption]

        try:
            assert order.enqueue(device.rng.choice(STREAMS), enqueue, enqueue) is not captures
        except (KeyboardInterrupt, ValueError) as error:
            assert error is interruption
        else:
            assert interruption is None
            if not captures:
                order.completion()  # which the test drops; the next piece takes another event
        device.go_on(6)
    device.go_on(1000)
    assert len(device.carried_out) > 5
    assert device.carried_out == list(range(len(device.carried_out)))


@pytest.mark.parametrize("device", [0], indirect=True)
@pytest.mark.parametrize("captures", [False, True])
def test_what_interrupts_first_is_what_goes_on(device: Device, order: Any, captures: bool) -> None:
    """A failed device, or an invalid capture, refuses to record, too."""
    if captures:
        device.captures = dict.fromkeys(STREAMS, 7)
    device.refuses = HandleError if captures else CUDARuntimeError
    device.interrupts = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        order.enqueue(1, *[lambda stream: device.enqueue(stream, 0)] * 2)
    with pytest.raises(device.refuses):
        order.enqueue(1, *[lambda stream: device.enqueue(stream, 1)] * 2)


@pytest.mark.parametrize("device", range(20), indirect=True)
def test_pieces_of_captures_that_take_turns_follow_each_other(device: Device, order: Any) -> None:
    device.captures = {stream: stream % 2 for stream in STREAMS}
    pieces: list[list[int]] = [[], []]
    for piece in range(60):
        stream = device.rng.choice(STREAMS)
        pieces[device.captures[stream]].append(piece)
        assert not order.enqueue(stream, None, lambda stream, piece=piece: device.enqueue(stream, piece))
        device.go_on(6)
    device.go_on(1000)
    for own in pieces:
        carried_out = [piece for piece in device.carried_out if piece in own]
        assert len(carried_out) > 5
        assert carried_out == own[: len(carried_out)]


@pytest.mark.parametrize("device", [0], indirect=True)
def test_captures_that_are_over_leave_few_events_behind(device: Device, order: Any) -> None:
    for capture in range(100):
        device.captures = dict.fromkeys(STREAMS, capture)
        for stream in STREAMS:
            order.enqueue(stream, None, lambda stream, piece=capture: device.enqueue(stream, piece))
    assert len(device._events) < 20
