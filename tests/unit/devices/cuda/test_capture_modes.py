"""The rights of threads while another thread captures a graph: with a driver that knows only their modes."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="the backend is one of the driver's")

from cuda.bindings import driver

from mpicomm.devices.cuda import capture as cuda_capture
from mpicomm.mpi.requests import Completer, Work

# The modules that import CuPy.
MODULES = [
    f"mpicomm.devices.cuda.{name}"
    for name in ("arrays", "local_event", "completion", "stream_order", "side_streams", "streams", "backend")
]
GLOBAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
RELAXED = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
LONG_S = 20


class Driver:
    """A driver whose threads have CUDA's default mode until they change it."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def mode(self) -> Any:
        """The mode of the calling thread."""
        return getattr(self._thread, "mode", GLOBAL)

    def call(self, function: Any, *arguments: Any) -> Any:
        if function is not driver.cuThreadExchangeStreamCaptureMode:
            return 1  # a stream
        before, (self._thread.mode,) = self.mode, arguments
        return before


@pytest.fixture
def threads() -> Driver:
    return Driver()


@pytest.fixture
def backend(threads: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    cuda = SimpleNamespace(
        Device=lambda ordinal: SimpleNamespace(use=lambda: None), driver=None, runtime=None, get_current_stream=None
    )
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    module = importlib.import_module(MODULES[-1])
    closable = SimpleNamespace(close=lambda: None)
    context = SimpleNamespace(current=contextlib.nullcontext, segments=set(), release=lambda: None)
    for each in (module, cuda_capture):
        monkeypatch.setattr(each, "call", threads.call)
    monkeypatch.setattr(module, "visible_devices", lambda: [None])
    monkeypatch.setattr(module, "PrimaryContext", lambda info: context)
    monkeypatch.setattr(module, "FaultPage", lambda *_: closable)
    monkeypatch.setattr(module, "SideStreams", lambda *_: closable)
    backend = module.CudaBackend(0, 1.0)
    yield backend
    backend.close()
    for name in MODULES:
        sys.modules.pop(name, None)  # what was there before comes back


def test_requests_are_completed_whatever_other_threads_capture(threads: Driver, backend: Any) -> None:
    seen: list[Any] = []

    def look() -> bool:
        seen.append(threads.mode)
        return len(seen) == 3

    backend.make_current()  # as the creation of a communicator does
    work = Work(look, lambda: seen.append(threads.mode))
    request = Completer().add(work, backend.prepare_thread).request
    until = time.monotonic() + LONG_S
    while not request.Test():
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert seen == [RELAXED] * 4
    assert threads.mode == GLOBAL


def test_a_user_s_thread_is_relaxed_while_it_loads_alone(threads: Driver, backend: Any) -> None:
    backend.make_current()
    with backend.loading():
        assert threads.mode == RELAXED
    assert threads.mode == GLOBAL
