"""Memory of stream-ordered pools without a GPU: descriptors and their owners, and the order of frees."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.handle import KEY_NBYTES, MemoryHandle
from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import ADDRESS, FakeCuda
from tests.helpers.faults.leaks import nothing_leaks
from tests.unit.devices.cuda.conftest import UUID

KIB = 1 << 10
KEY = bytes(range(KEY_NBYTES))


@pytest.fixture
def pools(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("mpicomm.devices.cuda.segments")
    monkeypatch.setattr(module, "bytes_of", lambda data: KEY)
    return module


def adopted(pools: Any, context: Any) -> Any:
    """An array that begins 1 KiB into an allocation of 4 KiB."""
    array = SimpleNamespace(data=SimpleNamespace(ptr=ADDRESS + KIB), nbytes=2 * KIB)
    return pools.adopt_pool(context, ADDRESS, 4 * KIB, array)


def test_the_allocation_is_over_before_a_peer_can_open_it(
    no_leaks: None, pools: Any, cuda: FakeCuda, context: Any
) -> None:
    ((handle, fd),) = adopted(pools, context).export()
    assert handle == MemoryHandle("pool", UUID, KEY, 4 * KIB, KIB, 2 * KIB)
    assert not os.get_inheritable(fd)
    fd.close()
    assert cuda.calls.index("cuCtxSynchronize") < cuda.calls.index("cuMemPoolExportPointer")


def test_an_export_that_fails_half_way_keeps_no_descriptor(cuda: FakeCuda, pools: Any, context: Any) -> None:
    cuda.refuses["cuMemPoolExportPointer"] = HandleError
    segment = adopted(pools, context)
    with nothing_leaks(), pytest.raises(HandleError) as error:  # the error holds its frames
        segment.export()
    assert error.tb is not None


def test_opened_memory_is_freed_before_its_pool(cuda: FakeCuda, pools: Any, context: Any) -> None:
    segment = pools.open_pool(context, MemoryHandle("pool", UUID, KEY, 4 * KIB, KIB, 2 * KIB), 7)
    assert (segment.pointer, segment.nbytes) == (ADDRESS + KIB, 2 * KIB)
    assert cuda.calls.index("cuMemPoolSetAccess") < cuda.calls.index("cuMemPoolImportPointer")
    cuda.calls.clear()
    segment.close()
    assert cuda.calls == ["cuMemFree", "cuMemPoolDestroy"]


def test_memory_that_is_opened_twice_is_freed_once(cuda: FakeCuda, pools: Any, context: Any) -> None:
    handle = MemoryHandle("pool", UUID, KEY, 4 * KIB, 0, KIB)
    first, second = (pools.open_pool(context, handle, 7) for _ in range(2))
    cuda.calls.clear()
    first.close()
    assert cuda.calls == ["cuMemPoolDestroy"]
    second.close()
    assert cuda.calls == ["cuMemPoolDestroy", "cuMemFree", "cuMemPoolDestroy"]
    pools.open_pool(context, handle, 7).close()
    assert cuda.calls[-2:] == ["cuMemFree", "cuMemPoolDestroy"]


def test_a_pool_that_is_still_in_use_is_destroyed_later(
    cuda: FakeCuda, pools: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_use, destroyed = True, 0

    def destroy(pool: Any) -> tuple[int]:
        nonlocal destroyed
        destroyed += not in_use
        return (int(in_use),)

    monkeypatch.setattr(cuda, "cuMemPoolDestroy", destroy)
    handle = MemoryHandle("pool", UUID, KEY, 4 * KIB, 0, KIB)
    first, second = (pools.open_pool(context, handle, 7) for _ in range(2))
    first.close()
    in_use = False
    second.close()
    assert destroyed == 2


@pytest.mark.parametrize("name", ["cuMemPoolSetAccess", "cuMemPoolImportPointer"])
def test_memory_that_cannot_be_opened_leaves_no_pool(cuda: FakeCuda, pools: Any, context: Any, name: str) -> None:
    cuda.refuses[name] = HandleError
    with pytest.raises(HandleError):
        pools.open_pool(context, MemoryHandle("pool", UUID, KEY, 4 * KIB, 0, KIB), 7)
    assert cuda.calls[-1] == "cuMemPoolDestroy"
    assert not context.segments
