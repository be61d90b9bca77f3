"""GPU memory without a GPU: segments that a Ctrl-C leaves open, failures half-way, and owners of descriptors."""

from __future__ import annotations

import contextlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="device memory comes from cuda-bindings")

from mpicomm.devices.cuda import memory as cuda_memory
from mpicomm.devices.cuda.memory import CudaSegment, IpcSegment, OpenedIpcSegment, StagedSegment, VirtualSegment
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import KEY_NBYTES, MemoryHandle
from mpicomm.errors import HandleError
from tests.helpers.leaks import nothing_leaks


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


@pytest.mark.parametrize("refused", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_host_memory_that_cannot_be_pinned_is_given_back(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = Context()
    made: list[str] = []

    def call(function: Any, *arguments: Any, hint: str = "") -> int:
        made.append(function.__name__)
        if function.__name__ == refused:
            raise HandleError("refused")
        return 0x7000

    monkeypatch.setattr(cuda_memory, "call", call)
    with nothing_leaks(), pytest.raises(HandleError, match="refused") as error:  # the error holds its frames
        StagedSegment.allocate(context, 1)
    assert error.tb is not None
    assert made[1:] == [] or made[1:] == ["cuMemHostGetDevicePointer", "cuMemHostUnregister"]
    assert not context.segments


def test_host_memory_that_was_exported_belongs_to_who_has_the_descriptor(no_leaks: None, calls: list[str]) -> None:
    context: Any = Context()
    segment = StagedSegment.allocate(context, 1)
    handle, fd = segment.export()
    segment.close()
    assert isinstance(fd, Descriptor)
    assert os.fstat(fd).st_size == handle.size
    fd.close()


def test_an_exported_descriptor_has_an_owner_and_no_child_inherits_it(
    no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(function: Any, *arguments: Any, hint: str = "") -> int:
        return os.memfd_create("test", 0) if function.__name__ == "cuMemExportToShareableHandle" else 0x7000

    monkeypatch.setattr(cuda_memory, "call", call)
    context: Any = Context()
    segment = VirtualSegment(context, "fd", 0x7000, 64, offset=0, nbytes=64, own=True)
    _, fd = segment.export()
    assert isinstance(fd, Descriptor)
    assert not os.get_inheritable(fd)
    del fd
