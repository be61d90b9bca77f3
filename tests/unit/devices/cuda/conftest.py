"""A context and a backend over a driver without a GPU."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda

UUID = bytes(range(16))


@pytest.fixture
def context(cuda: FakeCuda) -> Any:
    module = importlib.import_module("mpicomm.devices.cuda.memory")
    context = module.PrimaryContext(SimpleNamespace(ordinal=0, uuid=UUID))
    cuda.calls.clear()
    return context


@pytest.fixture
def backend(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module = importlib.import_module("mpicomm.devices.cuda.backend")
    monkeypatch.setattr(module, "visible_devices", lambda: [SimpleNamespace(ordinal=0, uuid=UUID)])
    monkeypatch.setattr(module, "FaultPage", lambda *_: SimpleNamespace(close=lambda: None))
    backend = module.CudaBackend(0, 1.0)
    yield backend
    backend.close()
