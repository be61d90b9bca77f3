"""Device memory that an interrupt has left open is closed with the backend; without a device."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="device memory comes from cuda-bindings")

from mpicomm.backend import cuda_memory
from mpicomm.backend.cuda_memory import CudaSegment, IpcSegment, OpenedIpcSegment
from mpicomm.handle import KEY_NBYTES, MemoryHandle


class Context:
    device = SimpleNamespace(ordinal=0, uuid=bytes(16))

    def __init__(self) -> None:
        self.segments: set[Any] = set()

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    made: list[str] = []

    def call(function: Any, *arguments: Any, hint: str = "") -> int:
        made.append(function.__name__)
        return 0x7000

    monkeypatch.setattr(cuda_memory, "call", call)
    monkeypatch.setattr(cuda_memory, "_mappings", {})
    return made


def opened(context: Any, key: bytes = b"a") -> CudaSegment:
    return OpenedIpcSegment(context, MemoryHandle("ipc", bytes(16), key.ljust(KEY_NBYTES, b"\0"), 64, 0, 64))


def test_the_context_knows_what_is_open(calls: list[str]) -> None:
    context: Any = Context()
    own, peers = IpcSegment.allocate(context, 5), opened(context)
    assert context.segments == {own, peers}
    for _ in range(2):
        own.close()
    assert context.segments == {peers}
    peers.close()
    assert not context.segments
    assert calls == ["cuMemAlloc", "cuIpcOpenMemHandle", "cuMemFree", "cuIpcCloseMemHandle"]


def test_what_was_interrupted_before_it_had_memory_is_not_open(
    calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context: Any = Context()

    def interrupt(*arguments: Any, hint: str = "") -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cuda_memory, "call", interrupt)
    with pytest.raises(KeyboardInterrupt):
        opened(context)
    assert not context.segments
