"""The transport by NCCL: the ranks that it takes, and calls of NCCL that do not return."""

from __future__ import annotations

import importlib
import threading
from typing import Any

import pytest

from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda


@pytest.fixture
def transport(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = importlib.import_module("mpicomm.domains.gpu.transports")
    monkeypatch.setattr(module.nccl, "missing", lambda: None)
    return module


def test_ranks_of_one_gpu_need_different_hosts(transport: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    transport.require_possible([b"A", b"B"])
    with pytest.raises(BackendUnavailableError, match="give each rank another NCCL_HOSTID"):
        transport.require_possible([b"A", b"A"])
    monkeypatch.setenv("NCCL_HOSTID", "0")
    transport.require_possible([b"A", b"A"])


def test_a_call_that_waits_too_long_is_left_to_its_thread(transport: Any) -> None:
    came = threading.Event()
    with pytest.raises(CollectiveTimeoutError, match=r"^no rank came within 0.1 s"):
        transport.bounded(lambda: came.wait(30), 0.1, "no rank came")
    came.set()
    assert transport.bounded(lambda: 5, 10, "no rank came") == 5


def test_an_error_of_a_call_arrives(transport: Any) -> None:
    def fail() -> None:
        raise RuntimeError("unhandled system error")

    with pytest.raises(HandleError, match="NCCL: unhandled system error"):
        transport.bounded(fail, 10, "no rank came")
