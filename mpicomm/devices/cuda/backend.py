"""CudaBackend: one GPU, with CuPy arrays over memory that the driver shares between processes."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from typing import Any

import cupy
import numpy as np
import numpy.typing as npt
from cuda.bindings import driver
from cupy.cuda import runtime

from mpicomm.devices.base import DifferingCalls, Launch, Link
from mpicomm.devices.cuda.driver import DriverShutDownError, call, visible_devices
from mpicomm.devices.cuda.events import EVENT_HANDLE_NBYTES, CudaEvent
from mpicomm.devices.cuda.faults import FaultPage
from mpicomm.devices.cuda.launches import LaunchGraph, MessageSteps
from mpicomm.devices.cuda.links import link_to
from mpicomm.devices.cuda.load import Kernel, kernels_of
from mpicomm.devices.cuda.memory import BLOCK_NBYTES, CudaSegment, PrimaryContext
from mpicomm.devices.cuda.segments import SegmentsOfGpu
from mpicomm.devices.cuda.stream_order import relax, relaxed
from mpicomm.devices.cuda.stream_threads import SideStream
from mpicomm.devices.cuda.streams import StreamsOfGpu
from mpicomm.devices.cuda.virtual_memory import VirtualSegment
from mpicomm.devices.handle import VIRTUAL_KINDS, Kind, MemoryUse
from mpicomm.errors import BackendUnavailableError, CollectiveTimeoutError, HandleError, MpicommError, PeerError
from mpicomm.kernels.message import MESSAGE_KERNEL, SIGNAL_KERNEL, SignalArguments
from mpicomm.kernels.packing import PACK_KERNEL, PACK_THREADS, PackTable, blocks_for
from mpicomm.kernels.team import Faults
from mpicomm.kernels.variant import Variant
from mpicomm.waiting import uninterrupted


class CudaBackend(StreamsOfGpu, SegmentsOfGpu):
    """GPU ``ordinal``. Its methods are for any thread, and keep the current device of the thread.

    Every method is local. Only the work of `wait_signal` waits for a peer. A failure raises `HandleError` (memory),
    `InvalidUsageError` (arguments) or `BackendUnavailableError`. The first kernel of a kind loads its code, which
    blocks.
    """

    def __init__(self, ordinal: int, timeout_s: float, *, completes: bool = False) -> None:
        devices = visible_devices()
        if not 0 <= ordinal < len(devices):
            raise BackendUnavailableError(
                f"device={ordinal}: this process sees GPUs 0 to {len(devices) - 1}; choose one of them, or widen "
                "CUDA_VISIBLE_DEVICES"
            )
        self.device: int | str = ordinal
        """Device ordinal; "cpu" for `HostBackend`."""
        self.info = devices[ordinal]
        super().__init__(ordinal, PrimaryContext(self.info))
        self._devices = devices
        self.timeout_ns = int(timeout_s * 1e9)
        """The time that a kernel waits for a peer before it gives up."""
        self.completes = completes
        """Whether blocking calls on device memory are complete on return, so that each of them calls `complete`."""
        self.differing_calls: DifferingCalls | None = None
        """`check` calls it for the text of a `PeerError`."""
        self.kind: Kind | None = None
        """The handle kind of the communicator; None before its choice. Large scratch memory is of the same kind."""
        self._lock = threading.Lock()
        self._signal: Kernel | None = None
        self._steps: MessageSteps | None = None
        # The tables of datatypes on the device. Each stays until `close`, because a captured graph may read it. Equal
        # tables share memory, so a program that makes the same datatypes again and again needs no more memory.
        self._tables: dict[bytes, int] = {}
        self._tables_lock = threading.Lock()
        self._stream: Any = None
        self._faults: FaultPage | None = None
        self._closed = False
        self._large_scratch: list[VirtualSegment] = []
        try:
            with self._context.current():
                # Non-blocking: else this stream would wait for the user's work on the null stream.
                self._stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._faults = FaultPage(self._context, self._stream)
        except HandleError:
            self.close()
            raise

    def make_current(self) -> None:
        """Make the device current on the calling thread: other libraries then allocate and launch on it."""
        cupy.cuda.Device(self._ordinal).use()

    def prepare_thread(self) -> None:
        """Like `make_current`, for a thread of mpicomm that works beside the threads of the user."""
        self.make_current()
        # A query of an event would spoil a graph that another thread captures, although the event is no part of it. The
        # threads of the user keep their mode, because a capture in CUDA's default mode shall watch their calls. Also, a
        # change of mode around each query takes several times as long as the query.
        relax()

    def pointer_table(self, pointers: list[int]) -> Any:
        """Return a uint64 ``cupy.ndarray`` of addresses; it holds them when this returns."""
        with self._context.current():
            table = cupy.array(pointers, dtype=np.uint64)
            # CuPy fills the table on its current stream, and kernels that read it may run on any stream.
            cupy.cuda.get_current_stream(self._ordinal).synchronize()
        return table

    def eager_stream(self, stream: Any, array: Any) -> int | None:
        """Like `stream`, but return None for a stream that captures a graph, and raise as `check` does."""
        if self._faults is None or self._faults.error is not None or self._faults.record.state:
            self.check()
        resolved = self.stream(stream, array)
        # As `is_capturing`, without the time of a call, because each message comes here.
        if runtime.getDevice() == self._ordinal:
            return None if runtime.streamIsCapturing(resolved) else resolved
        return None if self.is_capturing(resolved) else resolved

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between two addresses of any device or of the host. Local, stream-ordered."""
        if nbytes == 0:
            return
        if runtime.getDevice() != self._ordinal:  # see StreamsOfGpu
            with self._context.current():
                self.copy(target, source, nbytes, stream)
            return
        try:
            runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, stream)
        except runtime.CUDARuntimeError as error:
            raise HandleError(f"cudaMemcpyAsync of {nbytes} bytes failed: {error}") from None

    def zero(self, pointer: int, nbytes: int) -> None:
        """Set bytes to zero. Blocking: the bytes are zero when this returns."""
        self.fill(pointer, nbytes, 0)

    def fill(self, pointer: int, nbytes: int, byte: int) -> None:
        """Set bytes to ``byte``, and wait only for that, not for other work of the device."""
        self._set(driver.cuMemsetD8Async, pointer, byte, nbytes)

    def fill_words(self, pointer: int, nbytes: int, word: int) -> None:
        """Like `fill`, with a word of four bytes."""
        self._set(driver.cuMemsetD32Async, pointer, word, nbytes // 4)

    def _set(self, function: Callable[..., Any], pointer: int, value: int, count: int) -> None:
        if count > 0:
            with self._context.current():
                call(function, pointer, value, count, self._stream)
                call(driver.cuStreamSynchronize, self._stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Wait for the work of one stream, or of the whole device."""
        with self._context.current():
            if stream is None:
                call(driver.cuCtxSynchronize)
            else:
                call(driver.cuStreamSynchronize, stream)

    def signal(self, sent: int, inbox: int, stream: int) -> None:
        """Add 1 to the counter at ``sent`` and publish it at ``inbox``, after all earlier work of the stream."""
        self._launch_signal(stream, sent, inbox, 0, waits=False)

    def wait_signal(self, expected: int, inbox: int, peer: int, stream: int) -> None:
        """Add 1 to the counter at ``expected``, and hold the stream until ``inbox`` has reached it or time is up."""
        self._launch_signal(stream, expected, inbox, peer, waits=True)

    def _launch_signal(self, stream: int, count: int, inbox: int, peer: int, *, waits: bool) -> None:
        faults = self.faults
        if self._signal is None:
            self._signal = self.load(SIGNAL_KERNEL)
        arguments = SignalArguments(count, inbox, self.timeout_ns, faults.record, faults.failed, peer, waits)
        with self._context.current():
            self._signal.launch_structure(stream, arguments, blocks=1, threads=1)

    def message_steps(self) -> MessageSteps:
        """Return the steps of messages. The first call loads their kernel, which blocks."""
        if self._steps is None:
            kernel = self.load(MESSAGE_KERNEL)
            self._steps = MessageSteps(self._context, kernel, self.faults, self.timeout_ns, self.capture)
        return self._steps

    def pack_table(self, table: PackTable) -> int:
        """Return the address of a table on the device. The table stays until `close`; blocking for a new table."""
        pointer = self._tables.get(table.content)  # without the lock, which a thread holds while it blocks
        if pointer is not None:
            return pointer
        with self._tables_lock:
            pointer = self._tables.get(table.content)
            if pointer is None:
                pointer = self.scratch(len(table.content))
                self._copy_table(table.content, pointer)
                self._tables[table.content] = pointer
            return pointer

    def load_packing(self, table: PackTable) -> None:
        """Load all that `pack` needs for a table. Local; blocking for what is new."""
        self.pack_table(table)
        self.load(PACK_KERNEL)

    def pack(self, table: PackTable, memory: int, packed: int, stream: int, *, unpacks: bool) -> None:
        """Pack the regions of a table, which lie from ``memory`` on, to ``packed``, or unpack them; stream-ordered.

        After a wait of this device has run out of time, it unpacks nothing.
        """
        arguments = table.arguments(self.pack_table(table), memory, packed, self.faults.failed, unpacks=unpacks)
        blocks = blocks_for(table.units, self.multiprocessors)
        self.launch(PACK_KERNEL, arguments, stream, blocks=blocks, threads=PACK_THREADS)

    def load(self, variant: Variant) -> Kernel:
        """Return a kernel that is compiled and loaded. Local; blocking for a kernel that is not loaded yet."""
        kernels = kernels_of(self.info)
        kernel = kernels.find(variant)
        if kernel is None:
            with self.loading():
                kernel = kernels.load(variant)
        return kernel

    def launch(self, variant: Variant, arguments: ctypes.Structure, stream: int, *, blocks: int, threads: int) -> None:
        """Enqueue a kernel whose one parameter is a structure by value; stream-ordered, capturable. It loads the kernel
        first, unless `load` has done so."""
        kernel = self.load(variant)
        with self._context.current():
            kernel.launch_structure(stream, arguments, blocks=blocks, threads=threads)

    def launcher(self, variant: Variant, arguments: ctypes.Structure) -> Launch:
        """Return a function that launches a kernel as `launch` does, each time with the content of ``arguments``.

        It takes a fraction of the time.
        """
        kernel, context = self.load(variant), self._context

        @cache
        def launch_of(blocks: int, threads: int) -> Callable[[int], None]:
            return kernel.launcher(arguments, blocks, threads).launch

        def enqueue(stream: int, blocks: int, threads: int) -> None:
            launch = launch_of(blocks, threads)
            if context.is_current():  # cheaper than a change of context, and nearly always true
                launch(stream)
            else:
                with context.current():
                    launch(stream)

        return enqueue

    def graph_of(self, enqueue: Callable[[int], object]) -> Callable[[int], None]:
        """Return a function that makes the launches of ``enqueue`` again, on a stream; not capturable.

        A single launch takes half the time of a launch by `launcher`. One thread calls it at a time.
        """
        return self.capture(enqueue).launch

    def capture(self, enqueue: Callable[[int], object]) -> LaunchGraph:
        """Return the graph of the work that ``enqueue`` enqueues on a stream. Local; blocking for some microseconds."""
        # Relaxed, because another stream of this thread may capture a graph.
        with self._context.current(), relaxed(), SideStream(self.side_streams) as stream:
            return LaunchGraph(self._context, stream, enqueue)

    def check(self) -> None:
        """Raise `CollectiveTimeoutError` if an earlier wait ran out of time. It does not wait for the device."""
        faults = self._faults
        # Usually there is no error, and every call comes here. `FaultPage.check` decides all other cases.
        if faults is None or faults.error is not None or faults.record.state:
            self._fault_page().check(self.differing_calls)

    def complete(self, stream: int) -> None:
        """Wait for the work that ``stream`` has at this call, and raise as `check` does; nothing in a capture."""
        self.wait(stream)
        self.check()

    def unraised_error(self) -> MpicommError | None:
        """Return the error that `check` would raise, if no check has raised it so far."""
        return None if self._faults is None else self._faults.unraised_error(self.differing_calls)

    def fail(self, error: CollectiveTimeoutError | PeerError) -> None:
        """Let every later `check` raise an error of the same class and text."""
        self._fault_page().fail(error)

    @property
    def faults(self) -> Faults:
        """The addresses at which kernels report that they cannot go on."""
        return self._fault_page().faults

    @property
    def multiprocessors(self) -> int:
        """The number of blocks, of any size, that can always run at once."""
        count = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        return int(call(driver.cuDeviceGetAttribute, count, self._ordinal))

    @property
    def total_nbytes(self) -> int:
        """The size of the device's memory in bytes."""
        return int(call(driver.cuDeviceTotalMem, self._ordinal))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which the device's context is current on the calling thread."""
        return self._context.current()

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Return a ``with`` block, for one thread at a time, that may load and allocate even during a capture."""
        with self._lock, self._context.current(), relaxed():  # a capture may be the first to use a kernel
            yield

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return pinned host memory of CuPy's pool. The last reference gives it back to the pool."""
        with self._context.current():
            memory = cupy.cuda.alloc_pinned_memory(max(nbytes, 1))
        return np.frombuffer(memory, np.uint8, nbytes)

    def scratch(self, nbytes: int) -> int:
        """Return the address of device memory straight from the driver.

        It stays until `close`, because a captured graph may use it, and a pool could give it to other users. Memory of
        whole blocks can be suspended if the communicator's memory can.
        """
        with self.loading(), uninterrupted():
            if self.kind in VIRTUAL_KINDS and nbytes >= BLOCK_NBYTES:
                self._large_scratch.append(VirtualSegment.allocate(self._context, self.kind, nbytes))
                return self._large_scratch[-1].pointer
            pointer = int(call(driver.cuMemAlloc, max(nbytes, 1)))
            CudaSegment(self._context, pointer, nbytes, partial(call, driver.cuMemFree, pointer))
            return pointer

    def suspend(self) -> None:
        """Give large scratch memory of `VIRTUAL_KINDS` back, and keep its addresses. No work may use it."""
        for segment in self._large_scratch:
            segment.suspend()

    def resume(self) -> None:
        """Take scratch memory again, with undefined contents. Tables of datatypes return with their contents."""
        for segment in self._large_scratch:
            segment.resume()
        with self._tables_lock:
            for content, pointer in self._tables.items():
                if len(content) >= BLOCK_NBYTES:
                    self._copy_table(content, pointer)

    def create_event(self) -> CudaEvent:
        """Return an event that other processes can open."""
        flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING | driver.CUevent_flags.CU_EVENT_INTERPROCESS
        with self._context.current():
            return CudaEvent(self._context, call(driver.cuEventCreate, int(flags)))

    def open_event(self, exported: bytes) -> CudaEvent:
        """Open a peer's event."""
        if len(exported) != EVENT_HANDLE_NBYTES:
            raise HandleError(f"event handle has {len(exported)} bytes instead of {EVENT_HANDLE_NBYTES}")
        handle = driver.CUipcEventHandle()
        ctypes.memmove(handle.getPtr(), exported, EVENT_HANDLE_NBYTES)
        with self._context.current():
            return CudaEvent(self._context, call(driver.cuIpcOpenEventHandle, handle))

    def link(self, device: bytes, kind: Kind) -> Link:
        """Return the link from this device to memory of the device with that UUID, opened as ``kind``."""
        return link_to(self.info, device, kind, self._devices)

    def memory_use(self) -> Iterable[MemoryUse]:
        """Return the memory of the fault page and of the tables of datatypes."""
        tables = MemoryUse("datatypes", device_nbytes=sum(map(len, self._tables)))
        return [self._faults.memory_use(), tables] if self._faults else ()

    def close(self) -> None:
        """Release the fault page, scratch memory, streams and the context. A second call does nothing.

        No kernel of this backend may run, and its segments and events must be closed. A Ctrl-C between two steps of a
        set-up may have left a segment open, which this closes, as it does scratch memory. Otherwise a peer's memory
        would stay mapped as long as the process lives. Then the driver may refuse to map later memory of the peer at
        the same address.
        """
        if self._closed:
            return
        self._closed = True
        faults, self._faults = self._faults, None
        while self._context.segments:
            next(iter(self._context.segments)).close()
        # In the context of this device, whichever thread closes: on a thread without a device, CUDA would make a
        # context on the first GPU.
        with contextlib.suppress(DriverShutDownError), self._context.current():
            self.side_streams.close()
            if self._stream is not None:
                call(driver.cuStreamDestroy, self._stream)
        if faults is not None:
            faults.close()
        self._context.release()

    def _copy_table(self, content: bytes, pointer: int) -> None:
        host = np.frombuffer(content, np.uint8)
        # A side stream, because the stream of the call may capture a graph.
        with self.loading(), SideStream(self.side_streams) as stream:
            self.copy(pointer, host.ctypes.data, len(content), stream)
            self.synchronize(stream)

    def _fault_page(self) -> FaultPage:
        if self._faults is None:
            raise HandleError(f"the communicator on GPU {self._ordinal} is freed; create another")
        return self._faults
