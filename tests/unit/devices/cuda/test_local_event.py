"""Events are destroyed in their context, on threads without one, too: with a driver that knows contexts."""

from __future__ import annotations

import gc
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="contexts are those of the driver's")

MODULE = "mpicomm.devices.cuda.local_event"
MINE, OTHER = 7, 8


class CUDADriverError(RuntimeError):
    status = 3  # CUDA_ERROR_NOT_INITIALIZED


class CUDARuntimeError(RuntimeError):
    pass


class Cuda:
    """CuPy's modules of that name: what is current on each thread, and in which contexts events were destroyed."""

    CUDADriverError = CUDADriverError
    CUDARuntimeError = CUDARuntimeError

    def __init__(self) -> None:
        self._thread = threading.local()
        self.eventDisableTiming = 2
        self.fails = False
        self.destroyed: list[int] = []

    def ctxGetCurrent(self) -> int:
        if self.fails:
            raise CUDADriverError("CUDA_ERROR_NOT_INITIALIZED")
        return getattr(self._thread, "context", 0)

    def ctxSetCurrent(self, context: int) -> None:
        self._thread.context = context

    def eventCreateWithFlags(self, flags: int) -> int:
        assert flags == self.eventDisableTiming
        if self.ctxGetCurrent() == OTHER:
            raise CUDARuntimeError("no room")
        return 0x1234

    def eventDestroy(self, event: int) -> None:
        assert event == 0x1234
        self.destroyed.append(self.ctxGetCurrent())


@pytest.fixture
def cuda() -> Cuda:
    return Cuda()


@pytest.fixture
def make(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Any]]:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cupy.cuda", SimpleNamespace(driver=cuda, runtime=cuda))
    event = importlib.import_module(MODULE).LocalEvent
    cuda.ctxSetCurrent(MINE)
    yield event
    sys.modules.pop(MODULE, None)  # what was there before comes back


@pytest.mark.parametrize("own", [0, MINE, OTHER])
def test_it_is_destroyed_in_its_context_wherever_it_is_collected(cuda: Cuda, make: Callable[[], Any], own: int) -> None:
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
    assert (cuda.destroyed, after) == ([MINE], [own])


def test_it_is_destroyed_with_its_last_reference(cuda: Cuda, make: Callable[[], Any]) -> None:
    event = make()
    assert event.ptr == 0x1234
    assert cuda.destroyed == []
    del event
    assert cuda.destroyed == [MINE]


# Python cannot raise an exception of __del__; pytest makes it an error.
def test_one_that_is_left_when_cuda_is_over_is_quiet(cuda: Cuda, make: Callable[[], Any]) -> None:
    event = make()
    cuda.fails = True
    del event
    assert cuda.destroyed == []


def test_one_that_cannot_be_made_is_not_destroyed(cuda: Cuda, make: Callable[[], Any]) -> None:
    cuda.ctxSetCurrent(OTHER)
    with pytest.raises(CUDARuntimeError):
        make()
    assert cuda.destroyed == []
