from __future__ import annotations

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cupy
import numpy as np
import pytest
from cuda.bindings import driver

from mpicomm.devices.cuda.backend import CudaBackend
from mpicomm.devices.handle import FD_KINDS, Kind, MemoryHandle
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError
from mpicomm.messages.in_flight import LINE_NBYTES
from tests.gpu import DEVICES

MIB = 1 << 20
KINDS: list[Kind] = ["ipc", "fd", "staged"]


@pytest.fixture
def backend() -> Iterator[CudaBackend]:
    backend = CudaBackend(0, timeout_s=5.0)
    yield backend
    backend.check()
    backend.close()


class Words:
    """The three words of one direction of signals, and two lines of words of messages, in one allocation."""

    def __init__(self, backend: CudaBackend) -> None:
        self.segment = backend.allocate("ipc", 256 + 2 * LINE_NBYTES)
        backend.zero(self.segment.pointer, self.segment.nbytes)
        self.lines = self.segment.pointer + 256
        self.sent, self.inbox, self.expected = (self.segment.pointer + offset for offset in (0, 8, 16))
        self._view = backend.view(self.segment, (3,), np.dtype(np.uint64))

    def counts(self) -> list[int]:
        return [int(count) for count in self._view.get()]


@pytest.fixture
def words(backend: CudaBackend) -> Iterator[Words]:
    words = Words(backend)
    yield words
    words.segment.close()


def new_stream() -> Any:
    return cupy.cuda.Stream(non_blocking=True)


def current_context() -> int:
    return int(driver.cuCtxGetCurrent()[1])


def test_device_info() -> None:
    info = DEVICES[0]
    assert info.ordinal == 0
    assert len(info.uuid) == 16
    assert info.uuid != bytes(16)
    assert info.name.strip("\0 ") == info.name != ""
    assert info.compute_capability >= (7, 0)
    assert info.pci_bus_id == info.pci_bus_id.lower()
    assert info.pci_bus_id.count(":") == 2


@pytest.mark.parametrize("kind", KINDS)
def test_allocates_views_and_exports(backend: CudaBackend, kind: Kind) -> None:
    segment = backend.allocate(kind, 2 * MIB + 1)
    assert segment.nbytes == 4 * MIB
    view = backend.view(segment, (3, 5), np.dtype(np.float32))
    assert view.data.ptr == segment.pointer
    view[...] = cupy.arange(15, dtype=np.float32).reshape(3, 5)
    assert view.get()[2, 4] == 14
    ((handle, fd),) = backend.export(segment)
    assert MemoryHandle.unpack(handle.pack()) == handle
    assert (handle.kind, handle.offset, handle.nbytes, handle.size) == (kind, 0, segment.nbytes, segment.nbytes)
    assert handle.device == DEVICES[0].uuid
    assert (fd is not None) == (kind in FD_KINDS)
    assert any(handle.key) == (kind == "ipc")
    if fd is not None:
        assert not os.get_inheritable(fd)
        fd.close()
    segment.close()
    segment.close()


def test_fabric_works_or_says_what_it_needs(backend: CudaBackend) -> None:
    try:
        segment = backend.allocate("fabric", 1)
    except HandleError as error:
        for word in ("IMEX", "/dev/nvidia-caps-imex-channels", 'handle="fd"', '"ipc"'):
            assert word in str(error)
        return
    ((handle, fd),) = backend.export(segment)
    assert any(handle.key)
    assert fd is None
    segment.close()


def test_an_impossible_size_names_it(backend: CudaBackend) -> None:
    kinds: list[Kind] = ["ipc", "fd"]
    for kind in kinds:
        with pytest.raises(HandleError, match=rf"CUDA_ERROR_OUT_OF_MEMORY.*{1 << 50} bytes on GPU 0"):
            backend.allocate(kind, 1 << 50)


def test_other_handles_are_refused(backend: CudaBackend) -> None:
    with pytest.raises(HandleError, match="memfd"):
        backend.open(((MemoryHandle("memfd", bytes(16), b"", 4096, 0, 4096), None),))
    with pytest.raises(HandleError, match="without its file descriptor"):
        backend.open(((MemoryHandle("fd", DEVICES[0].uuid, b"", 2 * MIB, 0, 2 * MIB), None),))


def test_an_ordinal_out_of_range_is_named() -> None:
    with pytest.raises(BackendUnavailableError, match=f"device={len(DEVICES)}"):
        CudaBackend(len(DEVICES), 1.0)


def test_zero_and_copy(backend: CudaBackend) -> None:
    one, other = backend.allocate("ipc", 1), backend.allocate("staged", 1)
    a, b = (backend.view(segment, (1024,), np.dtype(np.uint8)) for segment in (one, other))
    a[...] = 7
    b[...] = 1
    backend.synchronize()
    backend.zero(one.pointer + 1, 1000)
    assert a.get().sum() == 7 * 24
    stream = new_stream()
    backend.copy(other.pointer, one.pointer, 1024, stream.ptr)
    backend.copy(other.pointer, one.pointer, 0, stream.ptr)
    backend.synchronize(stream.ptr)
    assert (a.get() == b.get()).all()
    one.close()
    other.close()


def test_pointer_table(backend: CudaBackend) -> None:
    table = backend.pointer_table([1, 1 << 63])
    assert table.dtype == np.uint64
    assert table.get().tolist() == [1, 1 << 63]


# Signals


def test_signals_and_waits(backend: CudaBackend, words: Words) -> None:
    stream = new_stream()
    for _ in range(3):
        backend.signal(words.sent, words.inbox, stream.ptr)
    for _ in range(3):
        backend.wait_signal(words.expected, words.inbox, 0, stream.ptr)
    backend.synchronize(stream.ptr)
    backend.check()
    assert words.counts() == [3, 3, 3]


def test_a_wait_holds_its_stream(backend: CudaBackend, words: Words) -> None:
    waiting, signalling = new_stream(), new_stream()
    backend.wait_signal(words.expected, words.inbox, 0, waiting.ptr)
    time.sleep(0.05)
    assert not waiting.done
    backend.signal(words.sent, words.inbox, signalling.ptr)
    backend.synchronize(waiting.ptr)
    assert words.counts() == [1, 1, 1]


def test_counts_and_side_streams(backend: CudaBackend, words: Words) -> None:
    streams, first = backend.side_streams, new_stream()
    waiting = streams.acquire(streams.mark(first.ptr))
    steps = backend.message_steps()
    steps.wait(waiting, ready=words.lines, done=words.lines + LINE_NBYTES, count=7, blocks=1, peer=0)
    streams.release(waiting)
    other = streams.acquire()
    assert other != waiting  # the stream is still at work
    first_waits = streams.mark(waiting)
    streams.wait_event(first.ptr, first_waits)
    time.sleep(0.05)
    assert not first.done
    steps.announce(other, ready=words.lines, count=6)
    backend.synchronize(other)
    time.sleep(0.05)
    assert not first.done
    steps.announce(other, ready=words.lines, count=1)
    backend.synchronize(first.ptr)
    backend.check()
    streams.release(other)
    assert streams.acquire() in (waiting, other)
    assert not backend.is_capturing(first.ptr)


def test_a_thread_without_a_device_asks_whether_work_is_done() -> None:
    backend = CudaBackend(len(DEVICES) - 1, timeout_s=5.0)
    with backend.current():
        stream = new_stream()
        done = backend.completion(stream.ptr)
        stream.synchronize()
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(done).result()
        status, context = thread.submit(driver.cuCtxGetCurrent).result()
    assert int(status) == 0
    assert int(context) == 0  # the first GPU has not become this thread's
    backend.close()


@pytest.mark.parametrize("copies", [False, True])
def test_a_message_that_does_not_come(copies: bool) -> None:
    backend = CudaBackend(0, timeout_s=0.2)
    words = Words(backend)
    stream = new_stream()
    steps = backend.message_steps()
    line = {"ready": words.lines, "done": words.lines + LINE_NBYTES}
    if copies:
        steps.copy_out(backend.view(words.segment, (64,), np.dtype(np.uint8)).data.ptr, **line, peer=3)(
            stream.ptr, words.segment.pointer + 64, 64
        )
    else:
        steps.wait(stream.ptr, **line, count=1, blocks=1, peer=3)
    steps.announce(stream.ptr, ready=words.lines, count=5)  # is reported only once
    backend.synchronize(stream.ptr)
    with pytest.raises(CollectiveTimeoutError, match=r"message: number 1 from rank 3 .* within 0\.2") as raised:
        backend.check()
    assert raised.value.ranks == (3,)
    assert not backend.view(words.segment, (words.segment.nbytes,), np.dtype(np.uint8)).any()
    words.segment.close()
    backend.close()


def test_copies_through_one_place_again_and_again(backend: CudaBackend, words: Words) -> None:
    """The same copy again and again becomes a graph; then others come between."""
    stream, steps = new_stream(), backend.message_steps()
    done, nbytes = words.lines + LINE_NBYTES, 300_000
    with stream:
        place = cupy.zeros(nbytes, np.uint8)
        sent = [cupy.asarray(np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)) for seed in range(3)]
        received = [cupy.zeros(nbytes, np.uint8) for _ in range(2)]
    copy_in = steps.copy_in(place.data.ptr, ready=words.lines)
    copy_out = steps.copy_out(place.data.ptr, ready=words.lines, done=done, peer=0)
    for number, (length, one, other) in enumerate(
        [(nbytes, 0, 0)] * 8 + [(nbytes, 1, 1), (nbytes, 0, 0), (100, 2, 0), (nbytes, 2, 1)] * 3
    ):
        with stream:
            received[other].fill(number)
        copy_in(stream.ptr, sent[one].data.ptr, length)
        copy_out(stream.ptr, received[other].data.ptr, length)
        backend.synchronize(stream.ptr)
        backend.check()
        assert (received[other][:length] == sent[one][:length]).all()
        assert (received[other][length:] == number).all()
        for line in (words.lines, done):
            found = np.empty(LINE_NBYTES // 8, np.uint64)
            backend.copy(found.ctypes.data, line, LINE_NBYTES, stream.ptr)
            backend.synchronize(stream.ptr)
            assert (found == number + 1).all()


def test_signals_in_a_graph(backend: CudaBackend, words: Words) -> None:
    stream = new_stream()
    with stream:
        # The strictest mode, and the first use of the kernels, which loads them.
        stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeGlobal)
        backend.signal(words.sent, words.inbox, stream.ptr)
        backend.wait_signal(words.expected, words.inbox, 0, stream.ptr)
        graph = stream.end_capture()
    for _ in range(100):
        graph.launch(stream)
    backend.synchronize(stream.ptr)
    assert words.counts() == [100, 100, 100]


def test_a_signal_that_does_not_come() -> None:
    backend, other = CudaBackend(0, timeout_s=0.2), CudaBackend(0, timeout_s=0.2)
    words = Words(backend)
    stream = new_stream()
    backend.wait_signal(words.expected, words.inbox, 3, stream.ptr)
    backend.synchronize(stream.ptr)
    for _ in range(2):
        with pytest.raises(CollectiveTimeoutError, match=r"wait_signal: number 1 from rank 3 .* within 0\.2") as raised:
            backend.check()
        assert raised.value.ranks == (3,)
    other.check()
    start = time.monotonic()
    for _ in range(10):
        backend.wait_signal(words.expected, words.inbox, 4, stream.ptr)
    backend.signal(words.sent, words.inbox, stream.ptr)
    backend.synchronize(stream.ptr)
    assert time.monotonic() - start < 0.2  # later waits leave at once
    assert words.counts() == [0, 0, 0]  # no signal follows
    with pytest.raises(CollectiveTimeoutError, match="rank 3"):
        backend.check()
    words.segment.close()
    backend.close()
    other.close()


# Threads, events, links, end


def test_works_from_a_thread_and_keeps_its_device(backend: CudaBackend, words: Words) -> None:
    def work() -> tuple[int, int, int]:
        before = current_context()
        table = backend.pointer_table([7])
        segment = backend.allocate("fd", 1)
        backend.zero(segment.pointer, segment.nbytes)
        backend.view(segment, (4,), np.dtype(np.int32))
        stream = backend.stream(None)
        backend.signal(words.sent, words.inbox, stream)
        backend.wait_signal(words.expected, words.inbox, 0, stream)
        backend.synchronize(stream)
        segment.close()
        return before, current_context(), int(table.get()[0])

    with ThreadPoolExecutor(1) as executor:
        before, after, seven = executor.submit(work).result()
    assert before == after
    assert seven == 7
    assert words.counts() == [1, 1, 1]


def test_events(backend: CudaBackend) -> None:
    event = backend.create_event()
    assert len(event.export()) == 64
    recording, waiting = new_stream(), new_stream()
    event.record(recording.ptr)
    event.wait(waiting.ptr)
    event.close()
    event.close()
    with pytest.raises(HandleError, match="3 bytes"):
        backend.open_event(b"abc")


def test_links(backend: CudaBackend) -> None:
    assert backend.link(DEVICES[0].uuid, "ipc").path == "same device"
    assert backend.link(DEVICES[0].uuid, "staged").path == "staged"
    assert backend.link(bytes(16), "ipc").path == "unknown"


def test_closes_twice() -> None:
    backend = CudaBackend(0, 1.0)
    backend.close()
    backend.close()
    with pytest.raises(HandleError, match="freed"):
        backend.check()
