"""GPU memory without a GPU: segments, pools, virtual memory, registered arrays, descriptors, failures half-way."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.handle import KEY_NBYTES, Descriptor, MemoryHandle
from mpicomm.devices.host_memory import HostSegment
from mpicomm.errors import HandleError, InvalidUsageError
from tests.helpers.fakes.fake_cuda import ADDRESS, FakeCuda
from tests.helpers.faults.leaks import nothing_leaks
from tests.unit.devices.cuda.conftest import UUID


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
    cuda.refuses["cuIpcOpenMemHandle"] = KeyboardInterrupt  # before it has memory
    with pytest.raises(KeyboardInterrupt):
        opened(memory, context)
    assert not context.segments


def staged(memory: Any, context: Any) -> Any:
    return memory.pinned(context, HostSegment.allocate(memory.BLOCK_NBYTES), own=True)


def test_exported_memory_belongs_to_who_has_the_descriptor_and_no_child_inherits_it(
    no_leaks: None, memory: Any, virtual: Any, context: Any
) -> None:
    segment = staged(memory, context)
    for ((handle, fd),) in (
        segment.export(),
        virtual.VirtualSegment(context, "fd", ADDRESS, 64, offset=0, nbytes=64, own=True).export(),
    ):
        assert isinstance(fd, Descriptor) and not os.get_inheritable(fd)
        segment.close()
        assert handle.kind == "fd" or os.fstat(fd).st_size == handle.size
        fd.close()


KIB = 1 << 10
KEY = bytes(range(KEY_NBYTES))


@pytest.fixture
def pools(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module("mpicomm.devices.cuda.segments")
    monkeypatch.setattr(module.memory, "bytes_of", lambda data: KEY)
    return module


def adopted_pool(pools: Any, context: Any) -> Any:
    """An array that begins 1 KiB into an allocation of 4 KiB."""
    array = SimpleNamespace(data=SimpleNamespace(ptr=ADDRESS + KIB), nbytes=2 * KIB)
    return pools.adopt_pool(context, ADDRESS, 4 * KIB, array)


def test_the_allocation_is_over_before_a_peer_can_open_it(
    no_leaks: None, pools: Any, cuda: FakeCuda, context: Any
) -> None:
    ((handle, fd),) = adopted_pool(pools, context).export()
    assert handle == MemoryHandle("pool", UUID, KEY, 4 * KIB, KIB, 2 * KIB)
    assert not os.get_inheritable(fd)
    fd.close()
    assert cuda.calls.index("cuCtxSynchronize") < cuda.calls.index("cuMemPoolExportPointer")


def test_opened_memory_is_freed_once_and_before_its_pool(cuda: FakeCuda, pools: Any, context: Any) -> None:
    handle = MemoryHandle("pool", UUID, KEY, 4 * KIB, KIB, 2 * KIB)
    first, second = (pools.open_pool(context, handle, 7) for _ in range(2))
    assert (first.pointer, first.nbytes) == (ADDRESS + KIB, 2 * KIB)
    assert cuda.calls.index("cuMemPoolSetAccess") < cuda.calls.index("cuMemPoolImportPointer")
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


MIB = 1 << 20


@pytest.fixture
def virtual(cuda: FakeCuda) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.virtual_memory")


def adopted_virtual(virtual: Any, context: Any) -> Any:
    """An array that begins 1 MiB into the first of three allocations of 2 MiB, and ends 512 KiB into the last."""
    array = SimpleNamespace(data=SimpleNamespace(ptr=ADDRESS + MIB), nbytes=3 * MIB + MIB // 2)
    return virtual.adopt_virtual(context, [(ADDRESS + at * MIB, 2 * MIB) for at in (0, 2, 4)], array)


def handle(size: int, offset: int, nbytes: int) -> MemoryHandle:
    return MemoryHandle("fd", UUID, b"", size, offset, nbytes)


def test_each_allocation_of_an_array_is_exported_with_its_range(no_leaks: None, virtual: Any, context: Any) -> None:
    segment = adopted_virtual(virtual, context)
    assert (segment.pointer, segment.nbytes) == (ADDRESS + MIB, 3 * MIB + MIB // 2)
    exported = segment.export()
    assert [part for part, _ in exported] == [
        handle(2 * MIB, MIB, MIB),
        handle(2 * MIB, 0, 2 * MIB),
        handle(2 * MIB, 0, MIB // 2),
    ]
    for _, fd in exported:
        assert not os.get_inheritable(fd)
        fd.close()


def test_allocations_of_a_peer_are_mapped_one_after_the_other(
    virtual: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[tuple[str, Any]] = []
    call = virtual.call

    def record(function: Any, *arguments: Any, **hint: Any) -> Any:
        called.append((function.__name__, arguments))
        return call(function, *arguments, **hint)

    monkeypatch.setattr(virtual, "call", record)
    parts = handle(2 * MIB, MIB, MIB), handle(4 * MIB, 0, 4 * MIB), handle(2 * MIB, 0, 512)
    segment = virtual.VirtualSegment.open(context, tuple((part, 7) for part in parts))
    assert (segment.pointer, segment.nbytes) == (ADDRESS + MIB, 5 * MIB + 512)
    mapped = [arguments[:2] for name, arguments in called if name == "cuMemMap"]
    assert mapped == [(ADDRESS, 2 * MIB), (ADDRESS + 2 * MIB, 4 * MIB), (ADDRESS + 6 * MIB, 2 * MIB)]
    assert [arguments[1] for name, arguments in called if name == "cuMemSetAccess"] == [8 * MIB]
    assert [name for name, _ in called].count("cuMemRelease") == 3
    called.clear()
    segment.close()
    assert called == [("cuMemUnmap", (ADDRESS, 8 * MIB)), ("cuMemAddressFree", (ADDRESS, 8 * MIB))]


@pytest.mark.parametrize(
    "parts",
    [
        (handle(2 * MIB, 0, MIB), handle(2 * MIB, 0, 512)),  # a gap at the end of the first
        (handle(2 * MIB, 0, 2 * MIB), handle(2 * MIB, 512, 512)),  # a gap at the begin of the second
        (handle(2 * MIB, 0, 2 * MIB), MemoryHandle("fabric", UUID, bytes(64), 2 * MIB, 0, 512)),
    ],
)
def test_parts_that_do_not_follow_each_other_are_refused(
    virtual: Any, context: Any, parts: tuple[MemoryHandle, ...]
) -> None:
    with pytest.raises(HandleError, match="do not follow each other"):
        virtual.VirtualSegment.open(context, tuple((part, 7) for part in parts))


@pytest.mark.parametrize(
    ("refused", "number"),
    [
        *(("cuMemHostRegister", 0), ("cuMemHostGetDevicePointer", 0)),
        *(("cuMemPoolExportPointer", 0), ("cuMemPoolSetAccess", 0), ("cuMemPoolImportPointer", 0)),
        *(("cuMemRetainAllocationHandle", 2), ("cuMemImportFromShareableHandle", 1)),
        *(("cuMemAddressReserve", 0), ("cuMemMap", 1), ("cuMemSetAccess", 0)),
    ],
)
def test_a_failure_half_way_leaves_nothing(
    cuda: FakeCuda, memory: Any, pools: Any, virtual: Any, context: Any, refused: str, number: int
) -> None:
    """The call of that number is refused. Nothing is left that the calls before it have taken."""
    if "Host" in refused:
        act = partial(staged, memory, context)
    elif "Pool" in refused:
        shared = MemoryHandle("pool", UUID, KEY, 4 * KIB, 0, KIB)
        act = (
            adopted_pool(pools, context).export if "Export" in refused else partial(pools.open_pool, context, shared, 7)
        )
    elif "Retain" in refused:
        act = adopted_virtual(virtual, context).export
    else:
        act = partial(virtual.VirtualSegment.open, context, ((handle(2 * MIB, 0, 2 * MIB), 7),) * 2)
    before = set(context.segments)
    cuda.calls.clear()
    cuda.refuses[refused], cuda.before_refusal[refused] = HandleError, number
    with nothing_leaks(), pytest.raises(HandleError, match="refused") as error:  # the error holds its frames
        act()
    assert error.tb is not None
    assert context.segments == before
    left = Counter(cuda.calls)
    for taken, undone in (
        *(("cuMemHostRegister", "cuMemHostUnregister"), ("cuMemPoolImportFromShareableHandle", "cuMemPoolDestroy")),
        *(("cuMemRetainAllocationHandle", "cuMemRelease"), ("cuMemImportFromShareableHandle", "cuMemRelease")),
        *(("cuMemMap", "cuMemUnmap"), ("cuMemAddressReserve", "cuMemAddressFree")),
    ):
        assert left[undone] == left[taken] or (undone == "cuMemRelease" and not left[taken])


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
