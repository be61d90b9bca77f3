"""Virtual memory without a GPU: descriptors and their owners, and allocations that are mapped one after the other."""

from __future__ import annotations

import importlib
import os
from types import SimpleNamespace
from typing import Any

import pytest

from mpicomm.devices.handle import Descriptor, MemoryHandle
from mpicomm.errors import HandleError
from tests.helpers.fakes.fake_cuda import ADDRESS, FakeCuda
from tests.helpers.faults.leaks import nothing_leaks
from tests.unit.devices.cuda.conftest import UUID

MIB = 1 << 20


@pytest.fixture
def virtual(cuda: FakeCuda) -> Any:
    return importlib.import_module("mpicomm.devices.cuda.virtual_memory")


@pytest.fixture
def called(virtual: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The calls of the driver, with their arguments."""
    said: list[tuple[str, Any]] = []
    call = virtual.call

    def record(function: Any, *arguments: Any, **hint: Any) -> Any:
        said.append((function.__name__, arguments))
        return call(function, *arguments, **hint)

    monkeypatch.setattr(virtual, "call", record)
    return said


def adopted(virtual: Any, context: Any) -> Any:
    """An array that begins 1 MiB into the first of three allocations of 2 MiB, and ends 512 KiB into the last."""
    array = SimpleNamespace(data=SimpleNamespace(ptr=ADDRESS + MIB), nbytes=3 * MIB + MIB // 2)
    return virtual.adopt_virtual(context, [(ADDRESS + at * MIB, 2 * MIB) for at in (0, 2, 4)], array)


def handle(size: int, offset: int, nbytes: int) -> MemoryHandle:
    return MemoryHandle("fd", UUID, b"", size, offset, nbytes)


def test_an_exported_descriptor_has_an_owner_and_no_child_inherits_it(
    no_leaks: None, virtual: Any, context: Any
) -> None:
    segment = virtual.VirtualSegment(context, "fd", ADDRESS, 64, offset=0, nbytes=64, own=True)
    ((_, fd),) = segment.export()
    assert isinstance(fd, Descriptor)
    assert not os.get_inheritable(fd)
    del fd


def test_each_allocation_of_an_array_is_exported_with_its_range(no_leaks: None, virtual: Any, context: Any) -> None:
    segment = adopted(virtual, context)
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


def test_an_export_that_fails_half_way_keeps_no_descriptor(
    cuda: FakeCuda, virtual: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = virtual._exported

    def export(kind: Any, address: int) -> Any:
        if address == ADDRESS + 4 * MIB:
            raise HandleError("refused")
        return made(kind, address)

    monkeypatch.setattr(virtual, "_exported", export)
    segment = adopted(virtual, context)
    with nothing_leaks(), pytest.raises(HandleError, match="refused") as error:  # the error holds its frames
        segment.export()
    assert error.tb is not None


def test_allocations_of_a_peer_are_mapped_one_after_the_other(
    virtual: Any, context: Any, called: list[tuple[str, Any]]
) -> None:
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


def test_a_mapping_that_fails_half_way_leaves_nothing(
    cuda: FakeCuda, virtual: Any, context: Any, called: list[tuple[str, Any]]
) -> None:
    cuda.refuses["cuMemSetAccess"] = HandleError
    parts = handle(2 * MIB, 0, 2 * MIB), handle(2 * MIB, 0, 2 * MIB)
    with pytest.raises(HandleError):
        virtual.VirtualSegment.open(context, tuple((part, 7) for part in parts))
    undone = [call for call in called if call[0] in ("cuMemUnmap", "cuMemAddressFree", "cuMemRelease")]
    assert undone == [
        ("cuMemUnmap", (ADDRESS + 2 * MIB, 2 * MIB)),
        ("cuMemUnmap", (ADDRESS, 2 * MIB)),
        ("cuMemAddressFree", (ADDRESS, 4 * MIB)),
        ("cuMemRelease", (ADDRESS,)),
        ("cuMemRelease", (ADDRESS,)),
    ]
    assert not context.segments


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
