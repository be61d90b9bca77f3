"""Steps: launches the kernels of windows, with scratch memory for local buffers that kernels cannot access directly."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.collectives.packed import table_of_element
from mpicomm.devices.base import GrowingScratch
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels import window as kernels
from mpicomm.kernels.packing import blocks_for
from mpicomm.mpi.layout import DatatypeLayout, byte_run
from mpicomm.mpi.types import is_covered
from mpicomm.windows.buffers import LocalBuffer, Target, Update, is_aligned

_BYTE = np.dtype(np.uint8)
_CAPTURE_AT = 8
"""A launch that a program has made so many times in a row gets a graph."""


class RunUpdate:
    """Updates consecutive elements. Construction loads the kernel."""

    MOST_NBYTES = 1 << 31  # the bytes of a run have 32 bits

    def __init__(self, backend: GpuBackend, update: Update) -> None:
        self._backend = backend
        self._itemsize = itemsize = update.dtype.itemsize
        self._kernel = kernels.accumulate_kernel((update.kernel_type, update.op), itemsize)
        # The kernel reads a single run from its argument.
        walk = table_of_element(byte_run(itemsize)).arguments(0, 0, 0, backend.faults.failed, unpacks=True)
        self._arguments = kernels.AccumulateArguments(walk, 0)
        self._walk, self._run = self._arguments.walk, self._arguments.walk.first
        self._enqueue = backend.launcher(self._kernel, self._arguments)
        self._multiprocessors = backend.multiprocessors
        self._lock = threading.Lock()  # threads may call a window at once
        self._last = self._captured = (0, 0, 0, 0)  # the arguments of the last launch, and of the launch in the graph
        self._times = 0  # the number of launches in a row with the last arguments
        self._graph: Callable[[int], None] | None = None

    def __call__(self, target: int, values: int, result: int, nbytes: int, stream: int, captures: bool = False) -> None:
        """Enqueue the kernel. ``values`` and ``result`` are addresses; 0 for none.

        ``captures`` says whether the stream captures a graph.
        """
        update = target, values, result, nbytes
        with self._lock:
            if update == self._captured and self._graph is not None and not captures:
                self._graph(stream)
                return
            self._walk.memory, self._walk.packed, self._arguments.result = target, values, result
            self._run.run_nbytes = nbytes
            blocks = blocks_for(nbytes // self._itemsize, self._multiprocessors)
            if update != self._last:
                self._last, self._times = update, 0
            self._times += 1
            if self._times >= _CAPTURE_AT and not captures:  # for example a counter from which a program draws
                arguments = type(self._arguments).from_buffer_copy(self._arguments)
                launch = partial(self._backend.launch, self._kernel, arguments)
                self._graph = self._backend.graph_of(partial(launch, blocks=blocks, threads=kernels.ACCUMULATE_THREADS))
                self._captured = update
            self._enqueue(stream, blocks, kernels.ACCUMULATE_THREADS)


FENCES, POSTS, COMPLETES = (0, kernels.FENCE), (1, kernels.START), (2, kernels.WAIT)
"""The counts on the boards: each a kind, and the operation that a fault record names for a wait."""


def ranks_in(mask: int) -> Iterator[int]:
    """Yield the ranks of a bit mask, in their order: bit r stands for rank r."""
    for rank in range(mask.bit_length()):
        if mask >> rank & 1:
            yield rank


class Steps:
    """The steps of one-sided calls that this rank's GPU carries out, in the order of a stream.

    Sets of ranks are bit masks: see `ranks_in`. Construction loads the kernels that wait, before a kernel can spin.
    """

    def __init__(self, backend: GpuBackend, boards: list[int], rank: int) -> None:
        self._backend = backend
        self._rank = rank
        self._boards = boards
        self._scratch: dict[tuple[int, int], GrowingScratch] = {}  # by stream and index
        self.copy = backend.copy
        faults = backend.faults
        self._table = backend.pointer_table(list(boards))
        limits = backend.timeout_ns, faults.record, faults.failed
        self._arguments = kernels.SynchronisationArguments(int(self._table.data.ptr), 0, 0, *limits, rank)
        self._threads = threading.Lock()  # threads may call a window at once
        self._signal_and_wait = backend.launcher(kernels.SYNCHRONISE_KERNEL, self._arguments)
        self._lock = backend.launcher(kernels.LOCK_KERNEL, self._arguments)
        self.run_update = cache(partial(RunUpdate, backend))
        """Returns the launches that update consecutive elements. The first call loads their kernel."""

    def move(self, layout: DatatypeLayout, memory: int, packed: int, stream: int, *, unpacks: bool = False) -> None:
        """Pack elements, which lie from ``memory`` on, to ``packed``; with ``unpacks`` move them back."""
        self._backend.pack(table_of_element(layout), memory, packed, stream, unpacks=unpacks)

    def device_address(self, local: LocalBuffer, stream: int, itemsize: int = 1, index: int = 0) -> int:
        """Return the address in device memory at which kernels access the packed elements of a buffer.

        That is the buffer itself, or scratch memory ``index``, which is valid for the next steps on the stream. A
        captured graph gets separate memory, because it may run concurrently with the stream.
        """
        if local.on_device and local.elements.layout is None and local.pointer % itemsize == 0:
            return local.pointer
        if self._backend.is_capturing(stream):
            return self._backend.scratch(local.nbytes)
        return self._scratch.setdefault((stream, index), GrowingScratch(self._backend)).of(max(local.nbytes, 1))

    def signal_and_wait(self, count: tuple[int, int], signals: int, waits: int, stream: int) -> None:
        """Signal ranks, after all earlier work of the stream, and then wait for ranks."""
        if signals or waits:
            x = self._arguments
            with self._threads:
                (x.kind, x.operation), x.signals, x.waits = count, signals, waits
                self._signal_and_wait(stream, 1, kernels.WINDOW_THREADS)

    def have_signalled(self, count: tuple[int, int], ranks: int) -> bool:
        """Return whether `signal_and_wait` would wait for none of these ranks now. It blocks for some microseconds."""
        backend = self._backend
        row_nbytes = kernels.ROW_WORDS * kernels.WORD_NBYTES
        rows = backend.pinned(kernels.ROWS_OF_COUNTS * row_nbytes)
        stream = backend.side_streams.acquire()
        try:
            start = self._boards[self._rank] + count[0] * kernels.ROWS_OF_COUNTS * row_nbytes
            backend.copy(rows.ctypes.data, start, rows.nbytes, stream)
            backend.synchronize(stream)
        finally:
            backend.side_streams.release(stream)
        inbox, _, expected = rows.view(np.int64).reshape(kernels.ROWS_OF_COUNTS, kernels.ROW_WORDS)
        return all(inbox[rank] > expected[rank] for rank in ranks_in(ranks))

    def lock(self, releases: int, acquires: int, stream: int, *, exclusive: bool, yields: bool = False) -> None:
        """Release the locks of ranks, after all earlier work of the stream, and acquire those of other ranks.

        ``yields`` lets waiting exclusive locks pass first.
        """
        x = self._arguments
        with self._threads:
            x.operation, x.signals, x.waits, x.exclusive, x.yields = kernels.LOCK, releases, acquires, exclusive, yields
            self._lock(stream, 1, kernels.WINDOW_THREADS)

    def require_updatable(self, update: Update, target: Target, what: str) -> None:
        """Raise `InvalidUsageError` if `accumulate` cannot update these elements atomically. Local."""
        dtype, nbytes = update.dtype, update.dtype.itemsize
        if nbytes not in kernels.UPDATED_SIZES or not (
            update.op in (*kernels.MOVING, *kernels.LOCATING) or is_covered(dtype)
        ):
            raise InvalidUsageError(
                f"{what}: a GPU does not update elements of {dtype}: convert them to a type that it computes with"
            )
        if nbytes == kernels.WIDE_NBYTES and self._backend.info.compute_capability < (9, 0):
            raise InvalidUsageError(
                f"{what}: elements of {update.dtype} have {nbytes} bytes, which only GPUs of compute capability 9.0 or "
                "newer update at once: pass smaller elements"
            )
        if target.address % nbytes or not is_aligned(target.elements.layout, nbytes):
            raise InvalidUsageError(
                f"{what}: target: elements of {update.dtype} on rank {target.rank} do not lie at multiples of {nbytes} "
                "bytes, where a GPU updates them at once: pass another displacement, or align the memory"
            )

    def accumulate(self, update: Update, target: Target, values: int, result: int, stream: int) -> None:
        """Update elements, each atomically. ``values`` is the address of the contributions, one after the other.

        ``result`` is the address for the previous elements; 0 if no code needs them.
        """
        elements, backend, itemsize = target.elements, self._backend, update.dtype.itemsize
        if elements.layout is None and elements.nbytes <= RunUpdate.MOST_NBYTES:
            captures = backend.is_capturing(stream)
            self.run_update(update)(target.address, values, result, elements.nbytes, stream, captures)
            return
        table = table_of_element(byte_run(elements.nbytes) if elements.layout is None else elements.layout)
        regions = backend.pack_table(table)
        walk = table.arguments(regions, target.address, values, backend.faults.failed, unpacks=True)
        kernel = kernels.accumulate_kernel((update.kernel_type, update.op), itemsize)
        blocks = blocks_for(elements.nbytes // itemsize, backend.multiprocessors)
        arguments = kernels.AccumulateArguments(walk, result)
        backend.launch(kernel, arguments, stream, blocks=blocks, threads=kernels.ACCUMULATE_THREADS)

    def compare_and_swap(self, target: Target, value: int, compare: int, result: int, stream: int) -> None:
        """Replace one element by the element at ``value`` if its bits are the bits at ``compare``; atomic."""
        swap = kernels.SwapArguments(target.address, value, compare, result, self._backend.faults.failed)
        self._backend.launch(kernels.swap_kernel(target.elements.nbytes), swap, stream, blocks=1, threads=1)

    def pack(self, local: LocalBuffer, address: int, stream: int) -> None:
        """Copy the packed elements of a buffer to an address on the device, unless they lie there."""
        layout, backend = local.elements.layout, self._backend
        if layout is None:
            if address != local.pointer:
                backend.copy(address, local.pointer, local.nbytes, stream)
        elif local.on_device:
            self.move(layout, local.pointer, address, stream)
        else:
            self._require_no_capture(local, stream)
            # CUDA reads pageable memory before the call returns, so the staging memory may go afterwards.
            staging = np.empty(local.nbytes, np.uint8)
            pack_on_host(layout, local.pointer, staging.ctypes.data)
            backend.copy(address, staging.ctypes.data, local.nbytes, stream)

    def unpack(self, local: LocalBuffer, address: int, stream: int) -> None:
        """Do the reverse of `pack`. Blocking for host memory."""
        layout, backend = local.elements.layout, self._backend
        if not local.on_device:
            self._require_no_capture(local, stream)
            staging = None if layout is None else np.empty(local.nbytes, np.uint8)
            backend.copy(local.pointer if staging is None else staging.ctypes.data, address, local.nbytes, stream)
            backend.synchronize(stream)
            if layout is not None and staging is not None:
                pack_on_host(layout, local.pointer, staging.ctypes.data, unpacks=True)
        elif layout is not None:
            self.move(layout, local.pointer, address, stream, unpacks=True)
        elif address != local.pointer:
            backend.copy(local.pointer, address, local.nbytes, stream)

    def _require_no_capture(self, local: LocalBuffer, stream: int) -> None:
        if self._backend.is_capturing(stream):
            raise InvalidUsageError(
                f"{local.name} is in host memory, which the host copies only once: pass a device array to a captured "
                "call"
            )


def pack_on_host(layout: DatatypeLayout, memory: int, packed: int, *, unpacks: bool = False) -> None:
    """Pack elements in host memory, which lie from ``memory`` on, to ``packed``; with ``unpacks`` move them back.

    MPI's Pack would leave out the gaps in pairs of a value and an index, which updates of whole pairs need.
    """
    elements = array_at(memory + layout.begin, layout.end - layout.begin, _BYTE)
    offsets, in_order = _packed_offsets(layout), array_at(packed, layout.nbytes, _BYTE)
    if unpacks:
        elements[offsets] = in_order
    else:
        in_order[:] = elements[offsets]


@lru_cache(maxsize=16)  # an offset takes eight bytes
def _packed_offsets(layout: DatatypeLayout) -> npt.NDArray[np.int64]:
    """Return the offset of each packed byte from the first byte of the elements."""
    offsets = np.empty(layout.nbytes, np.int64)
    for region in layout.regions:
        begins: Any = np.array([region.offset - layout.begin])
        packed: Any = np.array([region.packed])
        for loop in region.loops:
            rounds = np.arange(loop.rounds)
            steps = loop.displacements() if loop.displs else rounds * loop.stride
            begins = (begins[:, None] + steps).ravel()
            packed = (packed[:, None] + rounds * loop.packed).ravel()
        run = np.arange(region.run_nbytes)
        offsets[(packed[:, None] + run).ravel()] = (begins[:, None] + run).ravel()
    return offsets
