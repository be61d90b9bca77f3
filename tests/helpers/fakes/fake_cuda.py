"""CUDA without a GPU: the part of CuPy and of cuda-bindings that mpicomm uses, with CUDA's rules."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import pytest

ADDRESS = 0x7000
"""The result of all functions that only note their calls."""
_NOT_READY = 600
_ROOMS = ("mpicomm.devices.cuda", "mpicomm.collectives.gpu", "mpicomm.domains.gpu", "mpicomm.products")

Function = TypeVar("Function", bound=Callable[..., Any])


class CUDARuntimeError(RuntimeError):
    pass


class CUDADriverError(RuntimeError):
    status = 3  # CUDA_ERROR_NOT_INITIALIZED


class Place(NamedTuple):
    """The end of the first ``number`` pieces of work of a stream."""

    stream: int
    number: int
    capture: int | None


def _may_fail(function: Function) -> Function:
    """Let a test choose the errors that a function of CUDA raises."""

    @functools.wraps(function)
    def wrapper(self: FakeCuda, *arguments: Any) -> Any:
        if function.__name__ in self.refuses:
            if not self.before_refusal[function.__name__]:
                raise self.refuses[function.__name__](f"{function.__name__} is refused")
            self.before_refusal[function.__name__] -= 1
        result = function(self, *arguments)
        if function.__name__ in self.interrupts:
            raise self.interrupts.pop(function.__name__)
        return result

    return wrapper  # type: ignore[return-value]


class FakeCuda:
    """Streams, which take their time, events, captures, and the contexts and capture modes of threads.

    A stream also carries out the work that it captures, as if the program launched the graph at once. If a function of
    the driver is not here, its calls are only noted in ``calls``. All other names come from cuda-bindings.
    """

    CUDARuntimeError, CUDADriverError = CUDARuntimeError, CUDADriverError
    eventDisableTiming = 2  # noqa: N815
    eventDefault = 0  # noqa: N815
    memcpyDeviceToDevice = 3  # noqa: N815

    def __init__(self, seed: int) -> None:
        self._bindings = pytest.importorskip("cuda.bindings.driver", reason="the fake has the names of cuda-bindings")
        modes = self._bindings.CUstreamCaptureMode
        self.default, self.relaxed = modes.CU_STREAM_CAPTURE_MODE_GLOBAL, modes.CU_STREAM_CAPTURE_MODE_RELAXED
        self.rng = random.Random(seed)
        self._thread = threading.local()
        self._made = 100
        self._queues: dict[int, deque[tuple[Callable[[], object], Callable[[], bool]]]] = defaultdict(deque)
        self._over: Counter[int] = Counter()
        self._unjoined: set[int] = set()
        self.calls: list[str] = []
        self.refuses: dict[str, type[BaseException]] = {}
        """The errors that functions raise in place of their work."""
        self.before_refusal: Counter[str] = Counter()
        """How often such functions do their work before."""
        self.interrupts: dict[str, BaseException] = {}
        """The errors that functions raise once, when they have done their work."""
        self.now_us = 0
        """The time of the device: each piece of work takes a microsecond."""
        self._timed: set[int] = set()
        self._times_us: dict[int, int] = {}
        self.streams: list[int] = []
        """The streams that CuPy has made."""
        self.events: dict[int, Place | None] = {}
        """The events that exist, and the stream that has recorded each of them last."""
        self.destroyed_in: list[int] = []
        """The contexts in which events were destroyed."""
        self.captures: dict[int, int] = {}
        """The captures of the streams that take part in one."""
        self.graphs: set[int] = set()
        """The graphs that exist, by their captures."""
        self.invalid: set[int] = set()
        """The captures that an error has invalidated."""
        self.copied: list[Any] = []
        """The sources of the copies that are over, and the capture of each, if any."""
        self.launched: list[tuple[int, int]] = []
        """The graphs that were launched, by their captures, and their streams."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cu"):
            return getattr(self._bindings, name)

        def function(self: FakeCuda, *arguments: Any) -> tuple[int, int]:
            self.calls.append(name)
            return 0, ADDRESS

        function.__name__ = name
        return functools.wraps(function)(functools.partial(_may_fail(function), self))

    @property
    def mode(self) -> Any:
        """The capture mode of the calling thread."""
        return getattr(self._thread, "mode", self.default)

    def enqueue(self, stream: int, act: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        """Enqueue a piece of work, which begins when it is ready."""
        self._queues[stream].append((act, ready))
        if stream in self.captures:
            self._unjoined.add(stream)

    def end_of(self, stream: int) -> Place:
        """Return an event that is over when the work that the stream has so far is done."""
        return Place(stream, self._over[stream] + len(self._queues[stream]), self.captures.get(stream))

    def is_over(self, place: Place | None) -> bool:
        return place is None or self._over[place.stream] >= place.number

    def go_on(self) -> None:
        """Carry out up to two pieces of the enqueued work, on any streams."""
        for _ in range(self.rng.randrange(3)):
            self._carry_out()

    def finish(self) -> None:
        """Carry out all of the enqueued work, in any order that streams and events allow."""
        while any(self._queues.values()):
            assert self._carry_out(), "nothing can go on"

    def _carry_out(self) -> bool:
        waiting = [stream for stream, queue in self._queues.items() if queue]
        for stream in self.rng.sample(waiting, len(waiting)):
            act, ready = self._queues[stream][0]
            if ready():
                act()
                self._queues[stream].popleft()
                self._over[stream] += 1
                self.now_us += 1
                for event, place in self.events.items():
                    if place is not None and place[:2] == (stream, self._over[stream]):
                        self._times_us[event] = self.now_us
                return True
        return False

    def _new(self) -> int:
        self._made += 1
        return self._made

    # ---- cupy.cuda.driver

    @_may_fail
    def ctxGetCurrent(self) -> int:
        return getattr(self._thread, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:
        self._thread.context = context

    # ---- cupy.cuda.runtime

    def getDevice(self) -> int:
        return 0

    @_may_fail
    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags in (self.eventDefault, self.eventDisableTiming)
        event = self._new()
        self.events[event] = None
        if flags != self.eventDisableTiming:
            self._timed.add(event)
        return event

    @_may_fail
    def eventElapsedTime(self, start: int, stop: int) -> float:
        if not {start, stop} <= self._timed or not all(self.is_over(self.events[event]) for event in (start, stop)):
            raise CUDARuntimeError("cudaErrorInvalidResourceHandle, or cudaErrorNotReady")
        return (self._times_us[stop] - self._times_us[start]) / 1000

    def eventDestroy(self, event: int) -> None:
        del self.events[event]
        self.destroyed_in.append(self.ctxGetCurrent())

    @_may_fail
    def eventRecord(self, event: int, stream: int) -> None:
        assert event in self.events
        self.events[event] = self.end_of(stream)
        self._times_us[event] = self.now_us  # unless work comes before it

    def streamWaitEvent(self, stream: int, event: int) -> None:
        place = self.events[event]
        if place is not None and place.capture != self.captures.get(stream):
            # The wait takes a stream that captures nothing into an open capture. All else is isolated.
            assert stream not in self.captures
            assert place.capture is not None and place.capture in self.captures.values()
            self.captures[stream] = place.capture
        self.enqueue(stream, lambda: None, lambda: self.is_over(place))
        if place is not None:
            self._unjoined.discard(place.stream)

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        assert kind == self.memcpyDeviceToDevice
        copy = source, self.captures.get(stream)
        self.enqueue(stream, lambda: self.copied.append(copy))

    def memcpy2DAsync(
        self,
        target: int,
        target_pitch: int,
        source: int,
        source_pitch: int,
        nbytes: int,
        rows: int,
        kind: int,
        stream: int,
    ) -> None:
        assert rows > 1 and nbytes <= min(target_pitch, source_pitch)
        self.memcpyAsync(target, source, nbytes, kind, stream)

    def streamIsCapturing(self, stream: int) -> bool:
        if self.captures.get(stream) in self.invalid:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return stream in self.captures

    def graphLaunch(self, graph: int, stream: int) -> None:
        self.launched.append((graph, stream))

    # ---- cuda.bindings.driver

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"the fake refuses it"

    @_may_fail
    def cuStreamBeginCapture(self, stream: int, mode: Any) -> tuple[int]:
        assert stream not in self.captures and mode == self.relaxed
        self.captures[stream] = self._new()
        return (0,)

    def cuStreamEndCapture(self, stream: int) -> tuple[Any, int]:
        capture, results = self.captures.get(stream), self._bindings.CUresult
        if capture is None:
            return results.CUDA_ERROR_ILLEGAL_STATE, 0
        members = {each for each, its in self.captures.items() if its == capture}
        unjoined = members & self._unjoined - {stream}
        self._unjoined -= members
        for each in members:
            del self.captures[each]
        if unjoined and capture not in self.invalid:
            return results.CUDA_ERROR_STREAM_CAPTURE_UNJOINED, 0
        self.graphs.add(capture)
        return 0, capture

    def cuGraphDestroy(self, graph: int) -> tuple[int]:
        self.graphs.remove(graph)
        return (0,)

    @_may_fail
    def cuGraphInstantiate(self, graph: int, flags: int) -> tuple[int, int]:
        assert graph in self.graphs
        self.calls.append("cuGraphInstantiate")
        return 0, graph

    def cuEventQuery(self, event: int) -> tuple[int]:
        return (0 if self.is_over(self.events[event]) else _NOT_READY,)

    def cuStreamQuery(self, stream: int) -> tuple[int]:
        return (_NOT_READY if self._queues[stream] else 0,)

    @_may_fail
    def cuEventRecord(self, event: int, stream: int) -> tuple[int]:
        self.eventRecord(event, stream)
        return (0,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[int]:
        self.streamWaitEvent(stream, event)
        return (0,)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[int, Any, int]:
        return *self.cuStreamIsCapturing(stream), self.captures[stream]

    def cuStreamIsCapturing(self, stream: int) -> tuple[int, Any]:
        capture, status = self.captures.get(stream), self.CUstreamCaptureStatus
        if capture is None:
            return 0, status.CU_STREAM_CAPTURE_STATUS_NONE
        if capture in self.invalid:
            return 0, status.CU_STREAM_CAPTURE_STATUS_INVALIDATED
        return 0, status.CU_STREAM_CAPTURE_STATUS_ACTIVE

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[int, Any]:
        before, self._thread.mode = self.mode, mode
        return 0, before

    def cuMemExportToShareableHandle(self, allocation: int, kind: Any, flags: int) -> tuple[int, int]:
        return 0, os.memfd_create("exported", 0)

    @_may_fail
    def cuMemPoolExportToShareableHandle(self, pool: int, kind: Any, flags: int) -> tuple[int, int]:
        return 0, os.memfd_create("exported", 0)

    @_may_fail
    def cuMemImportFromShareableHandle(self, name: Any, kind: Any) -> tuple[Any, int]:
        self.calls.append("cuMemImportFromShareableHandle")
        return self._bindings.CUresult.CUDA_SUCCESS, ADDRESS

    # ---- cupy.cuda

    def Device(self, ordinal: int) -> SimpleNamespace:
        return SimpleNamespace(use=lambda: self.ctxSetCurrent(ADDRESS))

    def Event(self, disable_timing: bool) -> SimpleNamespace:
        assert disable_timing
        return SimpleNamespace(ptr=self.eventCreateWithFlags(self.eventDisableTiming))

    def Stream(self, non_blocking: bool) -> SimpleNamespace:
        assert non_blocking
        assert not self.captures or self.mode == self.relaxed
        stream = self._new()
        self.streams.append(stream)
        return SimpleNamespace(ptr=stream)


class _Library:
    """The library of the driver, as ctypes opens it."""

    def __init__(self, fake: FakeCuda) -> None:
        self._fake = fake

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(pointer: ctypes.c_void_p) -> int:
            status: int = getattr(self._fake, name)(pointer.value)[0]
            return status

        return call


@contextlib.contextmanager
def imported_over(fake: FakeCuda) -> Iterator[None]:
    """Import the modules that use CUDA anew inside a ``with`` block, over a fake; the ones from before come back."""
    cuda = SimpleNamespace(
        driver=fake, runtime=fake, Device=fake.Device, Event=fake.Event, Stream=fake.Stream, get_current_stream=None
    )
    before = _take_modules_out()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
            patch.setitem(sys.modules, "cupy.cuda", cuda)
            patch.setattr("cuda.bindings.driver", fake)
            patch.setattr("ctypes.CDLL", lambda name: _Library(fake))
            yield
    finally:
        _take_modules_out()
        sys.modules.update(before)
        for name, module in before.items():
            parent, _, child = name.rpartition(".")
            setattr(sys.modules[parent], child, module)


def _take_modules_out() -> dict[str, ModuleType]:
    return {name: sys.modules.pop(name) for name in [*sys.modules] if name.startswith(_ROOMS)}
