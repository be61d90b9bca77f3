"""The allocation of a registered array, and the warning if the allocation may hold other arrays."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.errors import InvalidUsageError
from tests.helpers.fakes.fake_cuda import FakeCuda

BASE = 1 << 40


@pytest.fixture
def arrays(cuda: FakeCuda) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.arrays")


@pytest.fixture
def said(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(arrays.logger, "warning", lambda text, *values: lines.append(text % values))
    return lines


def find(arrays: Any, monkeypatch: pytest.MonkeyPatch, begin: int, nbytes: int, size: int) -> None:
    """Find the allocation of an array that begins so many bytes after the begin of an allocation."""

    device = int(arrays.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    answers = iter([(device, False, 0, True), (BASE, size)])
    monkeypatch.setattr(arrays, "call", lambda *_, **__: next(answers))
    array = SimpleNamespace(data=SimpleNamespace(ptr=BASE + begin), nbytes=nbytes)
    assert arrays.allocations_of(array, 0) == ("ipc", [(BASE, size)])


def test_rounding_holds_no_other_array(arrays: Any, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for begin, nbytes, size in ((0, 12_000_000, 12_000_256), (0, 1, 512), (0, 4096, 4096), (256, 100, 512)):
        find(arrays, monkeypatch, begin, nbytes, size)
    assert said == []


@pytest.mark.parametrize(("begin", "nbytes", "size"), [(0, 512, 1024), (512, 512, 1024), (1024, 100, 2 << 20)])
def test_one_warning_tells_of_other_arrays(
    arrays: Any, said: list[str], monkeypatch: pytest.MonkeyPatch, begin: int, nbytes: int, size: int
) -> None:
    for _ in range(2):
        find(arrays, monkeypatch, begin, nbytes, size)
    find(arrays, monkeypatch, 0, 512, 4096)
    assert len(said) == 1
    assert f"the array has {nbytes} bytes and lies in an allocation of {size} bytes" in said[0]


def find_virtual(arrays: Any, monkeypatch: pytest.MonkeyPatch, *, exportable: set[int]) -> Any:
    """Find the allocations of an array that begins in the first of three allocations, and ends in the third."""

    def call(function: Any, *arguments: Any, **_: Any) -> Any:
        if function.__name__ == "cuPointerGetAttributes":
            return int(arrays.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE), False, 0, False
        (address,) = arguments
        return BASE + (address - BASE) // 4096 * 4096, 4096

    monkeypatch.setattr(arrays, "call", call)
    monkeypatch.setattr(arrays, "can_export", lambda address: address in exportable)
    array = SimpleNamespace(data=SimpleNamespace(ptr=BASE + 4000), nbytes=96 + 4096 + 4000)
    return arrays.allocations_of(array, 0)


def test_virtual_memory_has_an_allocation_for_each_mapping_if_it_was_made_for_export(
    arrays: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {BASE, BASE + 4096, BASE + 8192}
    kind, allocations = find_virtual(arrays, monkeypatch, exportable=every)
    assert (kind, allocations) == ("fd", [(BASE, 4096), (BASE + 4096, 4096), (BASE + 8192, 4096)])
    assert len(said) == 1
    assert "lies in an allocation of 12288 bytes" in said[0]
    with pytest.raises(InvalidUsageError, match=r"not made for export.*comm\.empty\(\).*expandable_segments:False"):
        find_virtual(arrays, monkeypatch, exportable={BASE, BASE + 4096})


def find_in_pool(arrays: Any, monkeypatch: pytest.MonkeyPatch, *, exportable: bool) -> Any:
    device = int(arrays.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    types = arrays.driver.CUmemAllocationHandleType
    name = "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR" if exportable else "CU_MEM_HANDLE_TYPE_NONE"
    answers = iter([(device, False, 7, False), int(getattr(types, name)), (BASE, 512)])
    monkeypatch.setattr(arrays, "call", lambda *_, **__: next(answers))
    return arrays.allocations_of(SimpleNamespace(data=SimpleNamespace(ptr=BASE), nbytes=512), 0)


def test_memory_of_a_pool_is_one_allocation_if_it_was_made_for_export(
    arrays: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_in_pool(arrays, monkeypatch, exportable=True) == ("pool", [(BASE, 512)])
    said = r"not made for export.*cudaMemPoolCreate.*troubles\.md.*backend:native"
    with pytest.raises(InvalidUsageError, match=said):
        find_in_pool(arrays, monkeypatch, exportable=False)
