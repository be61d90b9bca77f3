"""Copies beside kernels, eager and in captures that are open at once: on streams that know CUDA's rules for these."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="captures are told from each other with cuda-bindings")

from cuda.bindings import driver

from mpicomm.collectives.gpu.algorithms.steps import Copy
from mpicomm.devices.cuda import capture as cuda_capture

MODULES = (
    "devices.cuda.local_event",
    "devices.cuda.completion",
    "devices.cuda.stream_order",
    "collectives.gpu.algorithms.copies.copy_stream",
)
GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
NONE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
ACTIVE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
INVALIDATED = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_INVALIDATED


class Device:
    """Streams and events that know of captures, and nothing else."""

    CUstreamCaptureStatus = driver.CUstreamCaptureStatus
    CUstreamCaptureMode = driver.CUstreamCaptureMode

    def __init__(self) -> None:
        self._made = 100
        self._captures: dict[int, int] = {}
        self._invalidated: set[int] = set()
        self._unjoined: set[int] = set()
        self._mode: Any = GLOBAL
        self.memcpyDeviceToDevice = 3
        self._events: dict[int, tuple[int, int | None] | None] = {}
        self.streams: list[int] = []
        self.copies: list[tuple[int, int | None]] = []
        """From where, in which capture if any."""
        device = self

        class Event:
            def __init__(self, disable_timing: bool) -> None:
                self.ptr = device._new()
                device._events[self.ptr] = None

        class Stream:
            def __init__(self, non_blocking: bool) -> None:
                assert non_blocking
                assert not device._captures or device._mode == RELAXED
                self.ptr = device._new()
                device.streams.append(self.ptr)

        self.Event, self.Stream = Event, Stream

    def begin_capture(self, stream: int) -> int:
        assert stream not in self._captures
        self._captures[stream] = capture = self._new()
        return capture

    def invalidate(self, capture: int) -> None:
        self._invalidated.add(capture)

    def end_capture(self, stream: int) -> None:
        capture = self._captures[stream]
        members = {each for each, its in self._captures.items() if its == capture}
        assert capture in self._invalidated or not (members & self._unjoined) - {stream}
        for each in members:
            del self._captures[each]
        self._unjoined -= members

    def _new(self) -> int:
        self._made += 1
        return self._made

    # ---- CUDA's

    def streamIsCapturing(self, stream: int) -> bool:
        if self._captures.get(stream) in self._invalidated:
            raise RuntimeError("the stream was capturing, but an error has invalidated the capture sequence")
        return stream in self._captures

    def eventRecord(self, event: int, stream: int) -> None:
        self._events[event] = stream, self._captures.get(stream)

    def streamWaitEvent(self, stream: int, event: int) -> None:
        recorded = self._events[event]
        assert recorded is not None
        of, capture = recorded
        if self._captures.get(stream) != capture:
            # The wait takes a stream that captures nothing into the capture; any other is isolated.
            assert stream not in self._captures
            assert capture is not None
            self._captures[stream] = capture
        if capture is not None:
            self._unjoined.add(stream)
            self._unjoined.discard(of)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self.copies.append((source, self._captures.get(stream)))
        self._unjoined.add(stream)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, Any, int]:
        return 0, ACTIVE, self._captures[stream]

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, Any]:
        capture = self._captures.get(stream)
        return 0, NONE if capture is None else INVALIDATED if capture in self._invalidated else ACTIVE

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[int, Any]:
        before, self._mode = self._mode, mode
        return 0, before


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def copies(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    names = [f"mpicomm.{name}" for name in MODULES]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda = SimpleNamespace(Event=device.Event, Stream=device.Stream, driver=None, runtime=device)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    modules = [importlib.import_module(name) for name in names]
    for module in (cuda_capture, *modules[1:-1]):
        monkeypatch.setattr(module, "driver", device)
    copies = modules[-1].CopyStream()
    yield copies
    copies.close()
    for name in names:
        sys.modules.pop(name, None)  # what was there before comes back


def enqueue(copies: Any, stream: int, source: int) -> None:
    """What plans with copies do: two forks with their joins, and a copy behind the first of these."""
    copies.fork(stream)
    copies.copying(Copy(0, source, 1))(stream)
    copies.join(stream)
    copies.copying(Copy(0, source, 1))(stream)
    copies.fork(stream)
    copies.join(stream)


def test_copies_go_on_while_captures_are_open(device: Device, copies: Any) -> None:
    first, second = device.begin_capture(1), device.begin_capture(2)
    captures: dict[int, int | None] = {1: first, 2: second, 3: None}
    for stream in (1, 3, 2, 1, 3, 3, 2, 2, 1):
        device.copies.clear()
        enqueue(copies, stream, 70 + stream)
        assert device.copies == [(70 + stream, captures[stream])] * 2
    device.end_capture(1)
    captures[1] = None
    for stream in (1, 2):
        enqueue(copies, stream, 80 + stream)
        assert device.copies[-1] == (80 + stream, captures[stream])
    device.end_capture(2)


def test_streams_of_captures_that_are_over_are_used_again(device: Device, copies: Any) -> None:
    for _ in range(10):
        for stream in (1, 2):
            device.begin_capture(stream)
            enqueue(copies, stream, 7)
        enqueue(copies, 3, 7)
        for stream in (1, 2):
            device.end_capture(stream)
    assert len(device.streams) == 3


def test_a_stream_of_a_capture_that_failed_is_left_alone_until_that_ends(device: Device, copies: Any) -> None:
    failed = device.begin_capture(1)
    enqueue(copies, 1, 7)
    device.invalidate(failed)
    other = device.begin_capture(2)
    enqueue(copies, 2, 8)
    assert device.copies[-1] == (8, other)
    device.end_capture(1)
    device.begin_capture(3)
    enqueue(copies, 3, 9)
    for stream in (2, 3):
        device.end_capture(stream)
    assert len(device.streams) == 3
