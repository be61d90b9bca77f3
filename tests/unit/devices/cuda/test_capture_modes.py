"""The rights of threads while another thread captures a graph, with a driver that knows only their modes."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.mpi.requests import Completer, DeferredRequest
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.jobs.pace import HANG_S


@pytest.fixture
def backend(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = importlib.import_module("mpicomm.devices.cuda.backend")
    monkeypatch.setattr(module, "visible_devices", lambda: [SimpleNamespace(ordinal=0)])
    monkeypatch.setattr(module, "FaultPage", lambda *_: SimpleNamespace(close=lambda: None))
    backend = module.CudaBackend(0, 1.0)
    yield backend
    backend.close()


def test_requests_are_completed_whatever_other_threads_capture(cuda: FakeCuda, backend: Any) -> None:
    seen: list[Any] = []

    def look() -> bool:
        seen.append(cuda.mode)
        return len(seen) == 3

    backend.make_current()  # as the creation of a communicator does
    work = DeferredRequest.of(look, lambda: seen.append(cuda.mode))
    request = MPI.Request.fromhandle(Completer().add(work, backend.prepare_thread).handle)
    until = time.monotonic() + HANG_S
    while not request.Test():
        assert time.monotonic() < until
        time.sleep(1e-3)
    assert seen == [cuda.relaxed] * 4
    assert cuda.mode == cuda.default


def test_a_user_s_thread_is_relaxed_only_while_it_loads(cuda: FakeCuda, backend: Any) -> None:
    backend.make_current()
    with backend.loading():
        assert cuda.mode == cuda.relaxed
    assert cuda.mode == cuda.default
