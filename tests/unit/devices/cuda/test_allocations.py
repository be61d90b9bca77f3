"""The allocation of a registered array, and the warning if the allocation may hold other arrays."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.errors import InvalidUsageError
from tests.helpers.fakes.fake_cuda import FakeCuda

BASE = 1 << 40


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def find(cuda: FakeCuda, said: list[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    arrays = importlib.import_module("mpicomm.devices.cuda.segments")

    def find(begin: int, nbytes: int, size: int, kind: str = "ipc", exported: int = 3) -> Any:
        """Find the allocations of an array that begins so many bytes after the begin of allocations of one size.

        The first ``exported`` of them, or their pool, were made for export.
        """

        def call(function: Any, *arguments: Any, **_: Any) -> Any:
            if function.__name__ == "cuPointerGetAttributes":
                return int(arrays.driver.CUmemorytype.CU_MEMORYTYPE_DEVICE), False, 7 * (kind == "pool"), kind == "ipc"
            if function.__name__ == "cuPointerGetAttribute":
                return int(arrays.handle_type("fd")) * bool(exported)
            return BASE + (arguments[0] - BASE) // size * size, size

        monkeypatch.setattr(arrays, "call", call)
        monkeypatch.setattr(arrays, "can_export", lambda address: address < BASE + exported * size)
        return arrays.allocations_of(SimpleNamespace(data=SimpleNamespace(ptr=BASE + begin), nbytes=nbytes), 0)

    monkeypatch.setattr(arrays.logger, "warning", lambda text, *values: said.append(text % values))
    return find


@pytest.mark.parametrize(("begin", "nbytes", "size"), [(0, 512, 1024), (512, 512, 1024), (1024, 100, 2 << 20)])
def test_one_warning_tells_of_other_arrays_and_rounding_holds_none(
    find: Callable[..., Any], said: list[str], begin: int, nbytes: int, size: int
) -> None:
    for rounded in ((0, 12_000_000, 12_000_256), (0, 1, 512), (0, 4096, 4096), (256, 100, 512)):
        assert find(*rounded) == ("ipc", [(BASE, rounded[2])])
    assert said == []
    for array in ((begin, nbytes, size), (begin, nbytes, size), (0, 512, 4096)):
        find(*array)
    assert len(said) == 1
    assert f"the array has {nbytes} bytes and lies in an allocation of {size} bytes" in said[0]


def test_virtual_memory_and_pools_have_to_be_made_for_export(find: Callable[..., Any], said: list[str]) -> None:
    assert find(0, 512, 512, "pool") == ("pool", [(BASE, 512)])
    with pytest.raises(InvalidUsageError, match=r"made for export.*cudaMemPoolCreate.*troubles\.md.*backend:native"):
        find(0, 512, 512, "pool", 0)
    # The array begins in the first of three allocations, and ends in the third: each mapping is one.
    assert said == [] and find(4000, 8192, 4096, "fd") == ("fd", [(BASE + at, 4096) for at in (0, 4096, 8192)])
    assert len(said) == 1 and "lies in an allocation of 12288 bytes" in said[0]
    with pytest.raises(InvalidUsageError, match=r"not made for export.*comm\.empty\(\).*expandable_segments:False"):
        find(4000, 8192, 4096, "fd", 2)
