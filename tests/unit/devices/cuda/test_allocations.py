"""The allocation of a registered array, and the warning if the allocation may hold other arrays."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers.fakes.fake_cuda import FakeCuda

BASE = 1 << 40


@pytest.fixture
def arrays(cuda: FakeCuda) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.arrays")


@pytest.fixture
def said(arrays: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(arrays._log, "warning", lambda text, *values: lines.append(text % values))
    return lines


def find(arrays: Any, monkeypatch: pytest.MonkeyPatch, begin: int, nbytes: int, size: int) -> None:
    """Find the allocation of an array that begins so many bytes after the begin of an allocation."""

    device = int(arrays.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
    answers = iter([(device, False, 0, True), (BASE, size)])
    monkeypatch.setattr(arrays, "call", lambda *_, **__: next(answers))
    array = SimpleNamespace(data=SimpleNamespace(ptr=BASE + begin), nbytes=nbytes)
    assert arrays.allocation_of(array, 0) == arrays.Allocation(BASE, size)


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
