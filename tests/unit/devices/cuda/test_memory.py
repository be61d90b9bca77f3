"""GPU memory without a GPU: segments that a Ctrl-C leaves open, failures half-way, and owners of descriptors."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from mpicomm.devices.handle import KEY_NBYTES, Descriptor, MemoryHandle
from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import FakeCuda
from tests.helpers.faults.leaks import nothing_leaks


@pytest.fixture
def memory(cuda: FakeCuda) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.memory")


def opened(memory: Any, context: Any) -> Any:
    return memory.open_ipc(context, MemoryHandle("ipc", bytes(16), b"a".ljust(KEY_NBYTES, b"\0"), 64, 0, 64))


def test_the_context_knows_the_open_memory(cuda: FakeCuda, memory: Any, context: Any) -> None:
    own, peers = memory.allocate_ipc(context, 5), opened(memory, context)
    assert context.segments == {own, peers}
    for _ in range(2):
        own.close()
    assert context.segments == {peers}
    peers.close()
    assert not context.segments
    assert cuda.calls == ["cuMemAlloc", "cuIpcOpenMemHandle", "cuMemFree", "cuIpcCloseMemHandle"]


def test_what_was_interrupted_before_it_had_memory_is_not_open(cuda: FakeCuda, memory: Any, context: Any) -> None:
    cuda.refuses["cuIpcOpenMemHandle"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        opened(memory, context)
    assert not context.segments


@pytest.mark.parametrize("refused", ["cuMemHostRegister", "cuMemHostGetDevicePointer"])
def test_host_memory_that_cannot_be_pinned_is_given_back(
    cuda: FakeCuda, memory: Any, context: Any, refused: str
) -> None:
    cuda.refuses[refused] = HandleError
    with nothing_leaks(), pytest.raises(HandleError, match="refused") as error:  # the error holds its frames
        memory.allocate_staged(context, 1)
    assert error.tb is not None
    registered = ["cuMemHostRegister", "cuMemHostUnregister"]
    assert cuda.calls == ([] if refused == "cuMemHostRegister" else registered)
    assert not context.segments


def test_host_memory_that_was_exported_belongs_to_who_has_the_descriptor(
    no_leaks: None, memory: Any, context: Any
) -> None:
    segment = memory.allocate_staged(context, 1)
    ((handle, fd),) = segment.export()
    segment.close()
    assert isinstance(fd, Descriptor)
    assert os.fstat(fd).st_size == handle.size
    fd.close()
