"""Segments of host memory: allocate, view, export, open; and never map more of a file than it has."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.devices import host, host_memory
from mpicomm.devices.handle import Descriptor, MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import map_shared, memfd_create
from mpicomm.errors import HandleError
from tests.helpers.faults.interrupts import interrupt_everywhere
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.rigs.host_segments import PAGE, allocated, opened


@contextlib.contextmanager
def memory(nbytes: int) -> Iterator[Descriptor]:
    fd = memfd_create(nbytes)
    try:
        yield fd
    finally:
        fd.close()


@pytest.mark.parametrize("dtype", ["bool", "float32", "complex128", "datetime64[s]", [("a", "i2"), ("b", "f8")]])
def test_what_one_mapping_writes_the_other_reads(backend: HostBackend, dtype: Any) -> None:
    element = np.dtype(dtype)
    shapes: list[tuple[int, ...]] = [(), (0,), (7,), (0, 3), (3, 4, 5)]
    for shape in shapes:
        count = int(np.prod(shape))
        written = np.frombuffer(np.random.default_rng(1).bytes(60 * element.itemsize), element, count)
        with allocated(backend, written.nbytes) as own, opened(backend, own) as peer:
            assert own.pointer != peer.pointer
            here, there = backend.view(own, shape, element), backend.view(peer, shape, element)
            assert there.shape == shape
            assert there.dtype == element
            here[...] = written.reshape(shape)
            assert there.tobytes() == written.tobytes()
            there[...] = np.zeros(shape, element)
            assert here.tobytes() == bytes(written.nbytes)


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE, PAGE + 1])
def test_allocated_memory_is_whole_pages_of_zeros_of_its_own(backend: HostBackend, nbytes: int) -> None:
    byte = np.dtype(np.uint8)
    with allocated(backend, nbytes) as segment, allocated(backend, 1) as other:
        assert nbytes <= segment.nbytes <= max(nbytes, 1) + PAGE
        assert segment.nbytes % PAGE == segment.pointer % PAGE == 0
        backend.view(other, (other.nbytes,), byte)[:] = 1
        assert not backend.view(segment, (segment.nbytes,), byte).any()


def test_an_exported_descriptor_is_sealed_at_its_size(backend: HostBackend) -> None:
    with allocated(backend, 3 * PAGE) as segment:
        ((_, fd),) = backend.export(segment)
        assert fd is not None
        try:
            for size in (0, PAGE, 4 * PAGE):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            with pytest.raises(PermissionError):
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
            assert os.fstat(fd).st_size == 3 * PAGE
            assert not os.get_inheritable(fd)
        finally:
            fd.close()


def test_a_segment_is_exported_once(backend: HostBackend) -> None:
    with (
        allocated(backend, 1) as segment,
        opened(backend, segment),
        pytest.raises(HandleError, match="exported before"),
    ):
        backend.export(segment)


def test_an_interrupt_leaves_no_resources(backend: HostBackend) -> None:
    def export_and_open() -> object:
        own = backend.allocate("memfd", 1)
        exported = backend.export(own)
        return own, backend.open(exported), exported

    functions = interrupt_everywhere(export_and_open, host, host_memory)
    assert functions >= {"allocate", "memfd_create", "export", "open", "map_shared"}


def test_memory_is_unmapped_with_its_last_view(backend: HostBackend) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:mpicomm")

    before = mappings()
    with allocated(backend, PAGE) as own, opened(backend, own) as peer:
        here, there = (backend.view(each, (PAGE,), np.dtype(np.uint8)) for each in (own, peer))
    own.close()  # again
    here[:] = 5
    assert there.tolist() == [5] * PAGE
    assert mappings() == before + 2
    del here, there
    assert mappings() == before


def test_memory_that_is_not_available_is_refused_with_the_available_size(backend: HostBackend) -> None:
    with pytest.raises(HandleError, match=rf"cannot allocate {1 << 60} bytes .*: \d+ are available; make the array"):
        backend.allocate("memfd", 1 << 60)
    with pytest.raises(HandleError, match="are available"):
        backend.allocate("memfd", 1 << 70)


@pytest.mark.parametrize("function", ["os.memfd_create", "os.ftruncate", "mpicomm.devices.host_memory._map"])
def test_what_the_system_refuses_is_named(backend: HostBackend, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, refuse)
    # The error holds its frames, and they must hold nothing open.
    with nothing_leaks(), pytest.raises(HandleError, match="No space left on device") as error:
        backend.allocate("memfd", 1)
    assert error.tb is not None


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric", "staged", "memfd"])
def test_other_kinds_of_handles_and_a_handle_without_its_descriptor_are_refused(
    backend: HostBackend, kind: Any
) -> None:
    said = "memfd" if kind == "memfd" else f"cannot open a handle of kind {kind}: pass the same device="
    with memory(PAGE) as fd, pytest.raises(HandleError, match=said):
        backend.open(((MemoryHandle(kind, bytes(16), b"", PAGE, 0, PAGE), None if kind == "memfd" else fd),))


# An access beyond the end of a file kills the process.
@given(
    offset=st.integers(0, 4 * PAGE) | st.integers(0, 2**64 - 1),
    nbytes=st.integers(1, 4 * PAGE) | st.sampled_from([1 << 63, (1 << 64) - 1]),
)
def test_only_the_files_bytes_are_mapped(offset: int, nbytes: int) -> None:
    content = np.random.default_rng(1).bytes(3 * PAGE)
    with memory(3 * PAGE) as fd:
        os.write(fd, content)
        if offset + nbytes <= 3 * PAGE:
            assert map_shared(fd, offset, nbytes).tobytes() == content[offset : offset + nbytes]
        else:
            with pytest.raises(HandleError, match=f"has {3 * PAGE} bytes, its handle promised {offset + nbytes}"):
                map_shared(fd, offset, nbytes)


def test_descriptors_of_something_else_are_refused(no_leaks: None, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(PAGE))
    fds = [*os.pipe(), os.open(tmp_path, os.O_RDONLY), os.open(tmp_path / "file", os.O_RDONLY)]
    try:
        for fd in fds:
            with pytest.raises(HandleError):
                map_shared(fd, 0, PAGE)
    finally:
        for fd in fds:
            os.close(fd)
    with pytest.raises(HandleError, match="Bad file descriptor"):
        map_shared(fds[0], 0, PAGE)
