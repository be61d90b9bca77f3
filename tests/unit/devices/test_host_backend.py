"""The arguments of a host backend, its signals, memory that it adopts, and segments of host memory.

No segment maps more of a file than it has.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import itertools
import mmap
import multiprocessing.resource_tracker
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.devices import host, host_memory
from mpicomm.devices.handle import Descriptor, MemoryHandle
from mpicomm.devices.host import HostBackend
from mpicomm.devices.host_memory import map_shared, memfd_create
from mpicomm.errors import HandleError, InvalidUsageError
from tests.helpers.faults.interrupts import interrupt_everywhere
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.rigs.fd_exchanges import PAGE, allocated, opened


class DlpackProducer:
    """An array that offers only DLPack, as tensors of other libraries do."""

    def __init__(self, content: Any, error: Exception | None = None) -> None:
        self.content = content
        self.error = error

    def __dlpack__(self, **arguments: Any) -> Any:
        if self.error is not None:
            raise self.error
        return self.content.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.content.__dlpack_device__()


def test_host_arrays_are_taken_without_a_copy(no_leaks: None) -> None:
    local = np.zeros(4, np.float32)
    text = bytearray(16)
    for given_, size in ((local, 4), (local.data, 4), (DlpackProducer(local), 4), (text, 16)):
        taken = HostBackend(1.0).asarray(given_)
        assert taken.size == size
        assert np.shares_memory(taken, np.frombuffer(given_, np.uint8) if given_ is text else local)
    numbers = array.array("d", [1.0, 2.0])
    HostBackend(1.0).asarray(numbers)[1] = 3.0
    assert numbers[1] == 3.0


class GpuArray:
    __cuda_array_interface__ = {"shape": (1,)}


NO_ARRAYS: list[tuple[Any, str]] = [
    *(
        (value, f"^array is a {type(value).__name__}, .*: pass a NumPy array")
        for value in (None, 5, [1, 2], "text", object(), {1})
    ),
    *(
        (DlpackProducer(np.zeros(1), error("it needs a gradient")), "DLPack cannot hand over: it needs a gradient")
        for error in (BufferError, RuntimeError, ValueError, TypeError)
    ),
    (GpuArray(), r'GpuArray on a GPU.*: create it with device="auto"'),
]


@pytest.mark.parametrize(("value", "said"), NO_ARRAYS)
def test_what_is_no_host_array_is_refused_with_the_way_out(backend: HostBackend, value: Any, said: str) -> None:
    with pytest.raises(InvalidUsageError, match=said) as refusal:
        backend.asarray(value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**63 - 2])
def test_signals_go_on_counting_beyond_32_bits(backend: HostBackend, start: int) -> None:
    sent, expected, inbox = (np.full(1, start, np.uint64) for _ in range(3))
    for _ in range(5):
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        for _ in range(2):
            backend.wait_signal(expected.ctypes.data, inbox.ctypes.data, 0, 0)
    assert [int(word[0]) for word in (sent, expected, inbox)] == [start + 10] * 3


ELEMENTS = 5000


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    # The resource tracker of SharedMemory is a process that lives as long as this one.
    multiprocessing.resource_tracker.ensure_running()


@contextlib.contextmanager
def in_file(folder: str | Path, offset: int, dtype: Any, mode: Any = "r+") -> Iterator[npt.NDArray[Any]]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="with a space ") as file:
        file.truncate(ELEMENTS * 16)
        yield np.memmap(file.name, dtype, mode, offset, (ELEMENTS,))


def check_adopted(backend: HostBackend, local: npt.NDArray[Any]) -> None:
    """The array and an adopted segment hold the same bytes, and writes through one change no byte beside them."""
    local[...] = 1
    segment = backend.adopt(local)
    with opened(backend, segment) as peer:
        assert segment.pointer == local.ctypes.data
        assert peer.nbytes == segment.nbytes == local.nbytes
        remote = backend.view(peer, local.shape, local.dtype)
        assert remote.tolist() == local.tolist()
        remote[...] = np.arange(local.size).reshape(local.shape)
        assert local.tolist() == np.arange(local.size, dtype=local.dtype).reshape(local.shape).tolist()
        local[-1] = 77
        assert remote[-1].tolist() == local[-1].tolist()
    segment.close()
    local[...] = 2
    assert (local == 2).all()


@pytest.mark.parametrize("offset", [0, 1, 13, PAGE, PAGE + 1])
@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_shared_memory_is_adopted(backend: HostBackend, offset: int, dtype: str) -> None:
    shared = SharedMemory(create=True, size=ELEMENTS * 16)
    try:
        check_adopted(backend, np.ndarray((ELEMENTS,), dtype, shared.buf, offset))
    finally:
        shared.close()
        shared.unlink()


def test_a_memmap_and_a_part_of_it_are_adopted_whatever_its_name(backend: HostBackend, tmp_path: Path) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\x0c")  # file names need not be text
    os.mkdir(folder)
    for place, offset in itertools.product(("/dev/shm", folder), (0, 1, PAGE + 1)):
        with in_file(place, offset, "int32") as whole:
            check_adopted(backend, whole)
            whole[:] = -1
            check_adopted(backend, whole[1001:2001].reshape(10, 100))
            assert (whole[:1001] == -1).all() and (whole[2001:] == -1).all()


def test_an_empty_array_is_adopted_wherever_it_is(backend: HostBackend, tmp_path: Path) -> None:
    with in_file(tmp_path, 0, "float64") as local:
        for empty in (np.empty(0), np.empty((3, 0)), local[ELEMENTS:]):
            segment = backend.adopt(empty)
            with opened(backend, segment) as peer:
                assert backend.view(peer, empty.shape, empty.dtype).shape == empty.shape
            segment.close()


def refused_because(backend: HostBackend, local: npt.NDArray[Any]) -> str:
    with nothing_leaks(), pytest.raises(InvalidUsageError) as refusal:  # the error lives while the test looks for leaks
        backend.adopt(local)
    return str(refusal.value)


def test_private_memory_is_refused_with_the_way_out(backend: HostBackend, tmp_path: Path) -> None:
    way_out = "allocate it with comm.empty(), or place it in multiprocessing.shared_memory or a writable numpy.memmap"
    for nbytes in (1, 1 << 24):  # on the heap, and in a separate mapping
        assert way_out in refused_because(backend, np.zeros(nbytes, np.uint8))
    for mode in ("c", "r"):
        with in_file(tmp_path, 0, "int32", mode) as local:
            assert way_out in refused_because(backend, local)


def test_memory_without_a_name_is_refused_with_the_way_out(backend: HostBackend, tmp_path: Path) -> None:
    way_out = "allocate with comm.empty(), or register before the name is removed"
    assert way_out in refused_because(backend, np.frombuffer(mmap.mmap(-1, PAGE), np.uint8))
    np.zeros(PAGE, np.uint8).tofile(tmp_path / "first")
    local = np.memmap(tmp_path / "first", np.uint8, "r+")
    os.rename(tmp_path / "first", tmp_path / "second")
    check_adopted(backend, local)
    os.unlink(tmp_path / "second")
    assert way_out in refused_because(backend, local)
    # The name that the kernel shows for the removed file, and its name from before: both belong to other files now.
    for name in ("second (deleted)", "second"):
        np.zeros(PAGE, np.uint8).tofile(tmp_path / name)
        assert way_out in refused_because(backend, local)


@contextlib.contextmanager
def memory(nbytes: int) -> Iterator[Descriptor]:
    fd = memfd_create(nbytes)
    try:
        yield fd
    finally:
        fd.close()


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
