from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import multiprocessing.resource_tracker
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpicomm.backend.base import Link, Segment
from mpicomm.backend.host import HostBackend, HostSegment, fence, map_shared, memfd_create
from mpicomm.errors import CollectiveTimeoutError, HandleError, InvalidUsageError
from mpicomm.handle import MemoryHandle

PAGE = mmap.PAGESIZE
ELEMENTS = 5000

Bytes = npt.NDArray[np.uint8]


@pytest.fixture(scope="module", autouse=True)
def resource_tracker() -> None:
    # The process that watches over SharedMemory lives as long as this one.
    multiprocessing.resource_tracker.ensure_running()


@pytest.fixture
def backend(no_leaks: None) -> HostBackend:
    return HostBackend(60.0)


@contextlib.contextmanager
def allocated(backend: HostBackend, nbytes: int) -> Iterator[HostSegment]:
    segment = backend.allocate("memfd", nbytes)
    try:
        yield segment
    finally:
        segment.close()


@contextlib.contextmanager
def opened(backend: HostBackend, segment: Segment) -> Iterator[HostSegment]:
    """Map a segment a second time, as a peer does."""
    handle, fd = backend.export(segment)
    assert fd is not None
    try:
        peer = backend.open(MemoryHandle.unpack(handle.pack()), fd)
    finally:
        os.close(fd)
    try:
        yield peer
    finally:
        peer.close()


@contextlib.contextmanager
def memory(nbytes: int) -> Iterator[int]:
    fd = memfd_create(nbytes)
    try:
        yield fd
    finally:
        os.close(fd)


# ---- allocate, view, export, open


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
def test_allocated_memory_is_whole_pages_of_zeros(backend: HostBackend, nbytes: int) -> None:
    with allocated(backend, nbytes) as segment:
        assert nbytes <= segment.nbytes <= max(nbytes, 1) + PAGE
        assert segment.nbytes % PAGE == segment.pointer % PAGE == 0
        assert not backend.view(segment, (segment.nbytes,), np.dtype(np.uint8)).any()


def test_segments_do_not_share_memory(backend: HostBackend) -> None:
    byte = np.dtype(np.uint8)
    with allocated(backend, 1) as first, allocated(backend, 1) as second:
        backend.view(first, (1,), byte)[0] = 1
        assert backend.view(second, (1,), byte)[0] == 0


def test_an_exported_descriptor_is_sealed_at_its_size(backend: HostBackend) -> None:
    with allocated(backend, 3 * PAGE) as segment:
        _, fd = backend.export(segment)
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
            os.close(fd)


def test_a_segment_is_exported_once(backend: HostBackend) -> None:
    with (
        allocated(backend, 1) as segment,
        opened(backend, segment),
        pytest.raises(HandleError, match="exported before"),
    ):
        backend.export(segment)


def test_views_outlive_their_segments(backend: HostBackend) -> None:
    with allocated(backend, PAGE) as own, opened(backend, own) as peer:
        here = backend.view(own, (PAGE,), np.dtype(np.uint8))
        there = backend.view(peer, (PAGE,), np.dtype(np.uint8))
    here[:] = 5
    assert there.tolist() == [5] * PAGE


def test_memory_is_unmapped_with_its_last_view(backend: HostBackend) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:mpicomm")

    before = mappings()
    segment = backend.allocate("memfd", 1)
    view = backend.view(segment, (1,), np.dtype(np.uint8))
    segment.close()
    segment.close()
    assert mappings() == before + 1
    del view
    assert mappings() == before


def test_memory_that_is_not_available_is_refused_with_what_is(backend: HostBackend) -> None:
    with pytest.raises(HandleError, match=rf"cannot allocate {1 << 60} bytes .*: \d+ are available; make the array"):
        backend.allocate("memfd", 1 << 60)
    with pytest.raises(HandleError, match="are available"):
        backend.allocate("memfd", 1 << 70)


@pytest.mark.parametrize("function", ["os.memfd_create", "os.ftruncate", "mpicomm.backend.host._map"])
def test_what_the_system_refuses_is_named(backend: HostBackend, function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(function, refuse)
    with pytest.raises(HandleError, match="No space left on device"):
        backend.allocate("memfd", 1)


@pytest.mark.parametrize("kind", ["ipc", "fd", "fabric", "staged"])
def test_other_kinds_of_handles_are_refused(backend: HostBackend, kind: Any) -> None:
    with (
        memory(PAGE) as fd,
        pytest.raises(HandleError, match=f"cannot open a handle of kind {kind}: use device= alike"),
    ):
        backend.open(MemoryHandle(kind, bytes(16), b"", PAGE, 0, PAGE), fd)


def test_a_handle_without_its_descriptor_is_refused(backend: HostBackend) -> None:
    with pytest.raises(HandleError, match="memfd"):
        backend.open(MemoryHandle("memfd", bytes(16), b"", PAGE, 0, PAGE), None)


# ---- map_shared: a mapping that is longer than its file kills the process at the first access


@settings(deadline=None)
@given(offset=st.integers(0, 4 * PAGE) | st.integers(0, 2**64 - 1), nbytes=st.integers(1, 4 * PAGE))
def test_only_what_the_file_has_is_mapped(offset: int, nbytes: int) -> None:
    content = np.random.default_rng(1).bytes(3 * PAGE)
    with memory(3 * PAGE) as fd:
        os.write(fd, content)
        if offset + nbytes <= 3 * PAGE:
            assert map_shared(fd, offset, nbytes).tobytes() == content[offset : offset + nbytes]
        else:
            with pytest.raises(HandleError, match=f"has {3 * PAGE} bytes, its handle promised {offset + nbytes}"):
                map_shared(fd, offset, nbytes)


@pytest.mark.parametrize("nbytes", [1 << 63, (1 << 64) - 1])
def test_sizes_beyond_every_address_are_refused(nbytes: int) -> None:
    with memory(PAGE) as fd, pytest.raises(HandleError):
        map_shared(fd, 0, nbytes)


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


# ---- adopt


@contextlib.contextmanager
def in_shared_memory(offset: int, dtype: str) -> Iterator[npt.NDArray[Any]]:
    shared = SharedMemory(create=True, size=ELEMENTS * 16)
    try:
        yield np.ndarray((ELEMENTS,), dtype, shared.buf, offset)
    finally:
        shared.close()
        shared.unlink()


@contextlib.contextmanager
def in_file(folder: str | Path, offset: int, dtype: Any, mode: Any = "r+") -> Iterator[npt.NDArray[Any]]:
    with tempfile.NamedTemporaryFile(dir=folder, prefix="with a space ") as file:
        file.truncate(ELEMENTS * 16)
        yield np.memmap(file.name, dtype, mode, offset, (ELEMENTS,))


def check_adopted(backend: HostBackend, local: npt.NDArray[Any]) -> None:
    """What is written through an adopted segment is in the array, no byte beside it is, and the other way round."""
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
    with in_shared_memory(offset, dtype) as local:
        check_adopted(backend, local)
        del local


@pytest.mark.parametrize("offset", [0, 1, PAGE + 1])
@pytest.mark.parametrize("folder", ["/dev/shm", None])
def test_a_memmap_is_adopted(backend: HostBackend, folder: str | None, offset: int, tmp_path: Path) -> None:
    with in_file(folder or tmp_path, offset, "int32") as local:
        check_adopted(backend, local)


def test_a_part_of_a_memmap_is_adopted(backend: HostBackend, tmp_path: Path) -> None:
    with in_file(tmp_path, 3, "int32") as whole:
        whole[:] = -1
        check_adopted(backend, whole[1001:2001].reshape(10, 100))
        assert (whole[:1001] == -1).all()
        assert (whole[2001:] == -1).all()


def test_the_file_behind_a_memmap_has_what_a_peer_wrote(backend: HostBackend, tmp_path: Path) -> None:
    np.zeros(100, np.uint8).tofile(tmp_path / "file")
    local = np.memmap(tmp_path / "file", np.uint8, "r+", 10, (20,))
    with opened(backend, backend.adopt(local)) as peer:
        backend.view(peer, (20,), local.dtype)[:] = 9
    assert (tmp_path / "file").read_bytes() == bytes(10) + b"\x09" * 20 + bytes(70)


def test_file_names_need_not_be_text(backend: HostBackend, tmp_path: Path) -> None:
    folder = os.fsencode(tmp_path) + b"/\xff\x0c"
    os.mkdir(folder)
    with in_file(os.fsdecode(folder), 0, "uint8") as local:
        check_adopted(backend, local)


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_array_is_adopted_wherever_it_is(backend: HostBackend, shape: tuple[int, ...]) -> None:
    segment = backend.adopt(np.empty(shape))
    with opened(backend, segment) as peer:
        assert backend.view(peer, shape, np.dtype(np.float64)).shape == shape
    segment.close()


def test_the_end_of_a_memmap_is_adopted_although_it_is_empty(backend: HostBackend, tmp_path: Path) -> None:
    with in_file(tmp_path, 0, np.dtype((np.void, 16))) as local:
        segment = backend.adopt(local[ELEMENTS:])
        with opened(backend, segment) as peer:
            assert backend.view(peer, (0,), local.dtype).size == 0
        segment.close()


def refused_because(backend: HostBackend, local: npt.NDArray[Any]) -> str:
    with pytest.raises(InvalidUsageError) as refusal:
        backend.adopt(local)
    return str(refusal.value)


def test_private_memory_is_refused_with_the_way_out(backend: HostBackend, tmp_path: Path) -> None:
    way_out = "allocate it with comm.empty(), or place it in multiprocessing.shared_memory or a writable numpy.memmap"
    for nbytes in (1, 1 << 24):  # on the heap, and in a mapping of its own
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
    # What the kernel now calls the file, and what it called it before: both are others' files.
    for name in ("second (deleted)", "second"):
        np.zeros(PAGE, np.uint8).tofile(tmp_path / name)
        assert way_out in refused_because(backend, local)


# ---- arguments


class DlpackProducer:
    """What offers DLPack only, as tensors of other libraries do."""

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


@pytest.mark.parametrize("value", [None, 5, [1, 2], "text", object(), {1}], ids=repr)
def test_what_is_no_array_is_refused_with_the_way_out(backend: HostBackend, value: Any) -> None:
    expected = f"^array is a {type(value).__name__}, .*: pass a NumPy array"
    with pytest.raises(InvalidUsageError, match=expected) as refusal:
        backend.asarray(value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("error", [BufferError, RuntimeError, ValueError, TypeError])
def test_what_dlpack_refuses_is_named(backend: HostBackend, error: type[Exception]) -> None:
    with pytest.raises(InvalidUsageError, match=r"array is a DlpackProducer, .*: it needs a gradient"):
        backend.asarray(DlpackProducer(np.zeros(1), error("it needs a gradient")))


def test_gpu_arrays_are_refused_with_the_way_out(backend: HostBackend) -> None:
    class GpuArray:
        __cuda_array_interface__ = {"shape": (1,)}

    with pytest.raises(InvalidUsageError, match=r'GpuArray on a GPU.*: create it with device="auto"'):
        backend.asarray(GpuArray())


def test_there_are_no_streams(backend: HostBackend) -> None:
    assert backend.stream(None) == 0
    for stream in (0, 1, object()):
        with pytest.raises(InvalidUsageError, match=re.escape(f"stream={stream!r}: a cpu communicator has no streams")):
            backend.stream(stream)


# ---- work on addresses


@settings(deadline=None)
@given(source=st.integers(0, 200), target=st.integers(0, 200), nbytes=st.integers(0, 56))
def test_copies_move_these_bytes_and_no_others(source: int, target: int, nbytes: int) -> None:
    memory = np.arange(256, dtype=np.uint8)
    expected = memory.copy()
    expected[target : target + nbytes] = memory[source : source + nbytes].copy()
    HostBackend(1.0).copy(memory.ctypes.data + target, memory.ctypes.data + source, nbytes, 0)
    assert memory.tolist() == expected.tolist()


@pytest.mark.parametrize(("offset", "nbytes"), [(0, 0), (0, 1), (3, 10), (15, 1)])
def test_zero_clears_these_bytes_and_no_others(offset: int, nbytes: int) -> None:
    memory = np.full(16, 7, np.uint8)
    HostBackend(1.0).zero(memory.ctypes.data + offset, nbytes)
    assert memory.tolist() == [0 if offset <= index < offset + nbytes else 7 for index in range(16)]


def test_pointer_tables_hold_any_address() -> None:
    pointers = [0, 1 << 63, (1 << 64) - 1]
    table = HostBackend(1.0).pointer_table(pointers)
    assert table.dtype == np.uint64
    assert table.tolist() == pointers


def test_ranks_meet_in_host_memory(backend: HostBackend) -> None:
    assert backend.link(bytes(16), "memfd") == Link("host memory", access=True)


def test_events_need_nothing_but_a_fence(backend: HostBackend) -> None:
    event = backend.create_event()
    assert event.export() == b""
    event.record(0)
    backend.open_event(b"").wait(0)
    event.close()


# ---- signals


class Signals:
    """The counters of one direction between two ranks."""

    def __init__(self) -> None:
        self.words = np.zeros(3, np.uint64)
        self.sent, self.inbox, self.expected = (self.words.ctypes.data + 8 * index for index in range(3))


def test_a_signal_tells_the_other_thread_that_the_data_is_there(backend: HostBackend) -> None:
    rounds = 200
    there, back = Signals(), Signals()
    box = np.zeros(1, np.int64)

    def echo() -> None:
        for _ in range(rounds):
            backend.wait_signal(there.expected, there.inbox, 0, 0)
            box[0] *= 2
            backend.signal(back.sent, back.inbox, 0)

    with ThreadPoolExecutor(1) as pool:
        echoing = pool.submit(echo)
        for number in range(rounds):
            box[0] = number
            backend.signal(there.sent, there.inbox, 0)
            backend.wait_signal(back.expected, back.inbox, 1, 0)
            assert box[0] == 2 * number
        echoing.result()


def test_signals_are_counted_ahead_of_their_waits() -> None:
    backend, signals = HostBackend(0.05), Signals()
    for _ in range(3):
        backend.signal(signals.sent, signals.inbox, 0)
    for _ in range(3):
        backend.wait_signal(signals.expected, signals.inbox, 7, 0)
    backend.check()
    with pytest.raises(CollectiveTimeoutError, match=r"number 4 from rank 7 did not come within 0\.05 s") as timeout:
        backend.wait_signal(signals.expected, signals.inbox, 7, 0)
    assert timeout.value.ranks == (7,)
    assert signals.words.tolist() == [3, 3, 3]
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match="number 4 from rank 7 did not come") as timeout:
            backend.check()
        assert timeout.value.ranks == (7,)


def test_fences_of_many_threads_do_not_stop_each_other() -> None:
    def fence_often(thread: int) -> int:
        for _ in range(1000):
            fence()
        return thread

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(fence_often, range(8))) == list(range(8))
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("start", [0, 2**31 - 2, 2**32 - 2, 2**63 - 2])
def test_signals_go_on_counting_beyond_32_bits(backend: HostBackend, start: int) -> None:
    sent, expected, inbox = (np.full(1, start, np.uint64) for _ in range(3))
    for _ in range(5):
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        backend.signal(sent.ctypes.data, inbox.ctypes.data, 0)
        for _ in range(2):
            backend.wait_signal(expected.ctypes.data, inbox.ctypes.data, 0, 0)
    assert [int(word[0]) for word in (sent, expected, inbox)] == [start + 10] * 3
