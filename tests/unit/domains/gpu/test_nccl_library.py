"""NCCL's bindings, as doubles, and calls of NCCL that do not return."""

from __future__ import annotations

import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from mpicomm.domains.gpu import nccl_library
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError

ID = bytes(range(100, 228))


class CupyCommunicator:
    """CuPy's communicator; it notes its calls."""

    def __init__(self, size: int, unique_id: tuple[int, ...], rank: int) -> None:
        self.calls: list[Any] = [(size, unique_id, rank)]

    def send(self, *arguments: int) -> None:
        self.calls.append(("send", *arguments))

    def recv(self, *arguments: int) -> None:
        self.calls.append(("recv", *arguments))


@pytest.fixture
def only_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy has NCCL, and nccl4py is not installed."""
    module: Any = ModuleType("cupy.cuda.nccl")
    module.get_version = lambda: 22809
    module.get_unique_id = lambda: tuple(byte - 256 if byte > 127 else byte for byte in ID)
    module.NcclCommunicator = CupyCommunicator
    module.groupStart = module.groupEnd = lambda: None
    for name, value in (("nccl", None), ("nccl.core", None), ("cupy", ModuleType("cupy")), ("cupy.cuda.nccl", module)):
        monkeypatch.setitem(sys.modules, name, value)
    monkeypatch.setitem(sys.modules, "cupy.cuda", ModuleType("cupy.cuda"))


@pytest.mark.usefixtures("only_cupy")
def test_cupy_takes_the_place_of_nccl4py() -> None:
    library = nccl_library.load()
    assert library.name == "cupy.cuda.nccl 22809"
    assert library.unique_id() == ID
    comm: Any = library.create(4, ID, 3)
    comm.exchange([(1, 4096, 10)], [(2, 8192, 20)], 7)
    signed = tuple(byte - 256 if byte > 127 else byte for byte in ID)
    assert comm._comm.calls == [(4, signed, 3), ("send", 4096, 10, 1, 1, 7), ("recv", 8192, 20, 1, 2, 7)]


def test_where_no_binding_works_the_error_has_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nccl", "nccl.core", "cupy", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"nccl4py: .*; cupy: "):
        nccl_library.load()


def test_ranks_of_one_gpu_need_different_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    nccl_library.require_possible([b"A", b"B"])
    with pytest.raises(BackendUnavailableError, match="give each rank another NCCL_HOSTID"):
        nccl_library.require_possible([b"A", b"A"])
    monkeypatch.setenv("NCCL_HOSTID", "0")
    nccl_library.require_possible([b"A", b"A"])


def test_a_call_that_waits_too_long_is_left_to_its_thread() -> None:
    came = threading.Event()
    with pytest.raises(CollectiveTimeoutError, match=r"^no rank came within 0.1 s"):
        nccl_library.bounded(lambda: came.wait(30), 0.1, "no rank came")
    came.set()
    assert nccl_library.bounded(lambda: 5, 10, "no rank came") == 5


def test_an_error_of_a_call_arrives() -> None:
    def fail() -> None:
        raise RuntimeError("unhandled system error")

    with pytest.raises(HandleError, match="NCCL: unhandled system error"):
        nccl_library.bounded(fail, 10, "no rank came")
