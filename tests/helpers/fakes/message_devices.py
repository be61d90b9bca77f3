"""A double of a GPU for tests of messages: its streams are threads that are late at random, its memory is memfds.

Other processes open its memory through /proc. Only streams and counts order its work, so a missing wait shows as wrong
data.
"""

from __future__ import annotations

import collections
import ctypes
import os
import queue
import random
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.base import MessageCopy
from mpicomm.devices.cuda.stream_threads import StreamThreads, ThreadsOfStreams
from mpicomm.devices.handle import KEY_NBYTES, Exported, Kind, MemoryHandle
from mpicomm.devices.host import array_at, fence
from mpicomm.devices.host_memory import HostSegment, map_shared, memfd_create
from mpicomm.errors import CollectiveTimeoutError, HandleError
from mpicomm.kernels.message import MESSAGE_WORDS, blocks_of_message
from mpicomm.kernels.packing import PackTable
from mpicomm.mpi import descriptors
from tests.helpers.fakes import fake_driver
from tests.helpers.references.reference_packing import runs_of

POISON = 0xDB
LONGEST_FOR_KERNELS = 32 << 10
"""The longest message in these tests that kernels copy."""
_KEY = struct.Struct("<QQQ")


class DeviceArray:
    """An array in the memory of a `ThreadDevice`: a copy of the content, or the content itself."""

    def __init__(self, device: ThreadDevice, content: npt.NDArray[Any], *, copies: bool = True) -> None:
        self._device = device
        self.memory: npt.NDArray[Any] = np.array(content) if copies else content
        self.dtype = content.dtype
        self.itemsize = content.itemsize
        device.own(self.memory)
        fake_driver.own(self.memory)
        self.__cuda_array_interface__ = fake_driver.interface(self.memory)

    def get(self) -> npt.NDArray[Any]:
        """A copy after all work of the device."""
        self._device.synchronize()
        copy: npt.NDArray[Any] = self.memory.copy()
        return copy

    def fill(self, value: Any, stream: int = 0) -> None:
        """Overwrite all elements, in the order of the stream."""
        self._device.enqueue(stream, lambda: np.copyto(self.memory, value))


def _read_plain(array: DeviceArray) -> descriptors.ArrayDescriptor:
    return array.memory.ctypes.data, array.memory.size, (array.dtype, 0)


descriptors._readers[DeviceArray] = _read_plain


class _Stream:
    def __init__(self, rng: random.Random, slowest_s: float) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._rng = rng
        self._slowest_s = slowest_s
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def enqueue(self, act: Callable[[], object] | None) -> None:
        self._queue.put(act)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5)

    def _run(self) -> None:
        while act := self._queue.get():
            if self._rng.random() < 0.5:
                time.sleep(self._rng.random() * self._slowest_s)
            act()


class _SideStreams:
    def __init__(self, device: ThreadDevice) -> None:
        self._device = device
        self._free: list[int] = []
        self._made = 0

    def mark(self, stream: int, old: threading.Event | None = None) -> threading.Event:
        reached = threading.Event()
        self._device.enqueue(stream, reached.set)
        return reached

    def wait_stream(self, stream: int, other: int) -> None:
        self.wait_event(stream, self.mark(other))

    def is_done(self, mark: threading.Event) -> bool:
        return mark.is_set()

    def wait(self, mark: threading.Event) -> None:
        mark.wait()

    def wait_event(self, stream: int, mark: threading.Event) -> None:
        self._device.enqueue(stream, mark.wait)

    def acquire(self, after: threading.Event | None = None) -> int:
        with self._device.lock:
            stream = next((stream for stream in self._free if self.mark(stream).wait(0.001)), None)
            if stream is None:
                self._made += 1
                stream = -self._made
            else:
                self._free.remove(stream)
        if after is not None:
            self.wait_event(stream, after)
        return stream

    def release(self, stream: int, *, is_idle: bool = False) -> None:
        assert not is_idle or self.mark(stream).wait(1), "work is left"
        self._free.append(stream)


class _Steps:
    """The `MessageSteps` of a `ThreadDevice`."""

    def __init__(self, device: ThreadDevice) -> None:
        self._device = device

    def copy_in(self, slot: int, *, ready: int) -> MessageCopy:
        def copy(stream: int, pointer: int, nbytes: int, /) -> None:
            self._enqueue(stream, slot, pointer, nbytes, ready, sent=1)

        return copy

    def copy_out(self, slot: int, *, ready: int, done: int, peer: int) -> MessageCopy:
        def copy(stream: int, pointer: int, nbytes: int, /) -> None:
            blocks = blocks_of_message(nbytes)
            self._enqueue(stream, pointer, slot, nbytes, ready, done, awaits=1, taken=1, blocks=blocks, peer=peer)

        return copy

    def wait(self, stream: int, *, ready: int, done: int, count: int, blocks: int, peer: int) -> None:
        self._enqueue(stream, ready=ready, done=done, awaits=count, blocks=blocks, peer=peer)

    def announce(self, stream: int, *, ready: int, count: int) -> None:
        self._enqueue(stream, ready=ready, sent=count)

    def release(self, stream: int, *, done: int, count: int) -> None:
        self._enqueue(stream, done=done, taken=count)

    def _enqueue(
        self,
        stream: int,
        target: int = 0,
        source: int = 0,
        nbytes: int = 0,
        ready: int = 0,
        done: int = 0,
        *,
        awaits: int = 0,
        sent: int = 0,
        taken: int = 0,
        blocks: int = 1,
        peer: int = 0,
    ) -> None:
        device = self._device
        assert not nbytes or (device.owns(target) and device.owns(source)), "a kernel got memory of the host"
        device.waits += awaits > 0

        def step() -> None:
            until = time.monotonic() + device.timeout_s
            count = _words(done)[0] + np.uint64(awaits) if awaits else 0
            while device.missed is None and awaits and (_words(ready)[:blocks] < count).any():
                if time.monotonic() > until:
                    device.missed = f"message: number {count} from rank {peer} did not come", peer
                time.sleep(1e-4)
            fence()
            if device.missed is None:
                ctypes.memmove(target, source, nbytes)
                fence()
                if sent:
                    _words(ready)[:] += np.uint64(sent)
                if taken:
                    _words(done)[:] += np.uint64(taken)

        device.enqueue(stream, step)


class ThreadDevice:
    """A `mpicomm.devices.cuda.backend.CudaBackend` as far as messages use it, with counters and switches for tests."""

    device: int | str = 0
    kinds: tuple[Kind, ...] = ("ipc",)

    def __init__(self, rank: int, timeout_s: float, *, total_nbytes: int = 1 << 30, slowest_s: float = 2e-3) -> None:
        self.total_nbytes = total_nbytes
        self.lock = threading.Lock()
        self.side_streams = _SideStreams(self)
        self.opened: collections.Counter[bytes] = collections.Counter()
        self.allocated = 0
        self.tables: set[bytes] = set()
        self.host_copies = 0
        self.waits = 0
        self.capturing = False
        self.completes = False
        self.refuses: str | None = None
        self._slowest_s = slowest_s
        self._rng = random.Random(rank)
        self.timeout_s = timeout_s
        self._streams: dict[int, _Stream] = {}
        self.missed: tuple[str, int] | None = None
        self.is_told = False
        self._own: list[tuple[int, int, npt.NDArray[Any]]] = []
        """Begin and end of memory, and the memory."""
        self._segments: list[HostSegment] = []
        self._exported: list[Any] = []
        self.closed = False
        self._current = threading.local()
        self._threads = ThreadsOfStreams(lambda stream: False)

    def prepare_thread(self) -> None:
        self._current.is_this = True

    def own(self, memory: npt.NDArray[Any]) -> None:
        """Count memory as the device's. Copies from other memory read it at once, as from pageable memory."""
        begin = memory.ctypes.data
        self._own.append((begin, begin + max(memory.nbytes, 1), memory))

    def owns(self, pointer: int) -> bool:
        return any(begin <= pointer < end for begin, end, _ in self._own)

    def enqueue(self, stream: int, act: Callable[[], object]) -> None:
        assert not self.closed, "work on a device that is closed"
        # The thread of a test has the device since it made the communicator; threads of the package must take it.
        mine = not threading.current_thread().name.startswith("mpicomm") or hasattr(self._current, "is_this")
        assert mine, "a thread without a device uses one"
        if stream not in self._streams:
            self._streams[stream] = _Stream(random.Random(self._rng.random()), self._slowest_s)
        self._streams[stream].enqueue(act)

    def allocate(self, kind: Kind, nbytes: int) -> HostSegment:
        assert kind == "ipc"
        nbytes = max(nbytes, 1)
        if self.refuses is not None:
            raise HandleError(self.refuses)
        self.allocated += nbytes
        fd = memfd_create(nbytes)
        segment = HostSegment(map_shared(fd, 0, nbytes), fd=fd, size=nbytes)
        assert segment.content is not None
        segment.content[:] = POISON
        self._segments.append(segment)
        self.own(segment.content)
        return segment

    def export(self, segment: Any) -> Exported:
        self._exported.append(segment)  # so that no later segment has its identity
        key = _KEY.pack(os.getpid(), segment._fd, id(segment)).ljust(KEY_NBYTES, b"\0")
        return ((MemoryHandle("ipc", bytes(16), key, segment.nbytes, 0, segment.nbytes), None),)

    def open(self, parts: Exported) -> HostSegment:
        ((handle, _),) = parts
        pid, number, _ = _KEY.unpack_from(handle.key)
        assert pid != os.getpid(), "opened its own memory"
        self.opened[handle.key] += 1
        assert self.opened[handle.key] == 1, "opened twice"
        try:
            found = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise HandleError(f"cannot open it: {error}") from error
        try:
            segment = HostSegment(map_shared(found, 0, handle.nbytes))
        finally:
            os.close(found)
        assert segment.content is not None
        self.own(segment.content)
        return segment

    def zero(self, pointer: int, nbytes: int) -> None:
        self.fill(pointer, nbytes, 0)

    def fill(self, pointer: int, nbytes: int, byte: int) -> None:
        array_at(pointer, nbytes, np.dtype(np.uint8))[:] = byte

    def fill_words(self, pointer: int, nbytes: int, word: int) -> None:
        array_at(pointer, nbytes // 4, np.dtype(np.uint32))[:] = word

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        if not self.owns(source):
            self.host_copies += 1
            staged = ctypes.create_string_buffer(ctypes.string_at(source, nbytes), nbytes)
            self.enqueue(stream, lambda: ctypes.memmove(target, staged, nbytes))
        else:
            self.enqueue(stream, lambda: ctypes.memmove(target, source, nbytes))

    def message_steps(self) -> _Steps:
        return _Steps(self)

    def load_packing(self, table: PackTable) -> None:
        self.tables.add(table.content)

    def pack(self, table: PackTable, memory: int, packed: int, stream: int, *, unpacks: bool) -> None:
        assert table.content in self.tables, "a GPU would load now, perhaps while it waits for a peer that also loads"

        def move() -> None:
            if unpacks and self.missed is not None:
                return
            for start, place, nbytes in runs_of(table):
                mine, other = memory + start, packed + place
                ctypes.memmove(mine if unpacks else other, other if unpacks else mine, nbytes)

        self.enqueue(stream, move)

    def graph_of(self, enqueue: Callable[[int], object]) -> Callable[[int], object]:
        return enqueue

    def check(self) -> None:
        if self.missed is not None:
            self.is_told = True
            raise CollectiveTimeoutError(self.missed[0], ranks=[self.missed[1]])

    def unraised_error(self) -> CollectiveTimeoutError | None:
        if self.missed is None or self.is_told:
            return None
        return CollectiveTimeoutError(self.missed[0], ranks=[self.missed[1]])

    def is_capturing(self, stream: int) -> bool:
        return self.capturing

    def stream(self, stream: Any, array: Any = None) -> int:
        resolved = 0 if stream is None else int(stream)
        self._threads.add_user(resolved)
        return resolved

    def threads(self, stream: int) -> StreamThreads:
        return self._threads.of(stream)

    def needs_side_stream(self, stream: int, array: Any) -> bool:
        return self._threads.of(stream).is_shared

    def needs_host_barrier(self, stream: int, array: Any) -> bool:
        return self._threads.is_shared

    def eager_stream(self, stream: Any, array: Any) -> int | None:
        self.check()
        return None if self.capturing else self.stream(stream, array)

    def synchronize(self, stream: int | None = None) -> None:
        for each in list(self._streams) if stream is None else [stream]:
            assert self.side_streams.mark(each).wait(60)

    def complete(self, stream: int) -> None:
        self.synchronize(stream)
        self.check()

    def completion(self, stream: int) -> Callable[[], bool]:
        return self.side_streams.mark(stream).is_set

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def scratch(self, nbytes: int) -> int:
        memory = np.full(max(nbytes, 1) + 128, POISON, np.uint8)
        self.own(memory)
        return -(-memory.ctypes.data // 128) * 128

    def close(self) -> None:
        if not self.closed:
            self.synchronize()
            self.closed = True
            for stream in self._streams.values():
                stream.close()
            self._own.clear()
            assert all(segment.content is None for segment in self._segments), "memory was left"


def _words(pointer: int) -> npt.NDArray[np.uint64]:
    return array_at(pointer, MESSAGE_WORDS, np.dtype(np.uint64))
