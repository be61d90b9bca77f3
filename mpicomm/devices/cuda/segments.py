"""Arrays of other libraries as CuPy arrays, the allocations that hold an array, and segments by kind of handle."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import Counter
from functools import partial
from typing import Any

import cupy
import numpy as np
from cuda.bindings import driver

from mpicomm.devices.cuda import memory
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.memory import PrimaryContext
from mpicomm.devices.cuda.virtual_memory import (
    NO_ACCESS,
    VirtualSegment,
    access_for,
    adopt_virtual,
    can_export,
    handle_type,
)
from mpicomm.devices.handle import FD_KINDS, KEY_NBYTES, Descriptor, Exported, Kind, MemoryHandle
from mpicomm.devices.host_memory import HostSegment
from mpicomm.errors import HandleError, InvalidUsageError
from mpicomm.log import logger
from mpicomm.waiting import uninterrupted

_DLPACK_ON_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged
_USE_EMPTY = "allocate it with comm.empty()"


def _convert(array: Any, ordinal: int, name: str) -> Any:
    cls = type(array)
    class_name = cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
    torch = sys.modules.get("torch")  # only a program that has imported torch can pass a tensor
    if torch is not None and isinstance(array, torch.Tensor):
        array = _Tensor(array)
    try:
        if hasattr(array, "__dlpack__"):
            kind, device = array.__dlpack_device__()
            if kind in _DLPACK_ON_GPU:
                if device != ordinal:
                    raise _other_device(device, ordinal)
                return cupy.from_dlpack(array)
        elif hasattr(array, "__cuda_array_interface__"):
            return cupy.asarray(array)
    except (TypeError, ValueError, BufferError, RuntimeError, AttributeError) as error:
        if isinstance(error, InvalidUsageError):
            raise
        raise InvalidUsageError(
            f"{name} is a {class_name} that CuPy cannot view: {error}; pass a CuPy array"
        ) from error
    raise InvalidUsageError(
        f"{name} is a {class_name}, which is not on a GPU, but this communicator is on GPU {ordinal}: move it there "
        '(cupy.asarray(array), tensor.cuda()), or create the communicator with device="cpu"'
    )


class _Tensor:
    """A PyTorch tensor with a DLPack exchange that makes no stream wait.

    By default an exchange makes CuPy's current stream wait for PyTorch's. mpicomm uses both views on the stream that
    the caller names, and needs no such wait. While PyTorch captures a graph, the wait would draw CuPy's stream into the
    capture, and the capture would fail.
    """

    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor.detach()  # DLPack refuses a tensor that requires a gradient

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, device = self._tensor.__dlpack_device__()
        return int(kind), int(device)

    def __dlpack__(self, **_: Any) -> Any:
        return self._tensor.__dlpack__(stream=-1)


Allocation = tuple[int, int]
"""The address and the bytes of an allocation that holds an array, or a part of it."""


def allocations_of(array: Any, ordinal: int) -> tuple[Kind, list[Allocation]]:
    """Return the kind of handle by which peers open a non-empty ``cupy.ndarray``, and its allocations in order.

    Memory of ``cuMemAlloc`` is one allocation of the kind "ipc", and memory of a stream-ordered pool one of the kind
    "pool". Virtual memory has the kind "fd", and may be several allocations, because PyTorch's expandable segments grow
    by allocations. Local; the device's context must be current.
    Raises `InvalidUsageError` for memory that no peer can open. Logs a warning, once per process, if other arrays may
    become visible to peers.
    """
    global _warned
    pointer = array.data.ptr
    attribute = driver.CUpointer_attribute
    names = [
        attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
        attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED,
        attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
        attribute.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
    ]
    memory_type, managed, pool, ipc_capable = call(driver.cuPointerGetAttributes, len(names), names, pointer)
    # Managed memory first, because it also counts as device or host memory, wherever its pages are.
    if managed:
        raise InvalidUsageError(
            f"array lies in managed memory (cudaMallocManaged), which no peer can open; {_USE_EMPTY}, or call "
            "cupy.cuda.set_allocator(cupy.cuda.MemoryPool().malloc) before it is made"
        )
    if int(memory_type) != int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE):
        raise InvalidUsageError(
            f"array lies in host memory (pinned, or the system's), not on GPU {ordinal}; {_USE_EMPTY}, or copy it with "
            "cupy.array(array)"
        )
    handle_types = attribute.CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES
    if int(pool) != 0 and not call(driver.cuPointerGetAttribute, handle_types, pointer) & int(handle_type("fd")):
        raise InvalidUsageError(
            "array lies in a stream-ordered pool (cudaMallocAsync) that was not made for export, such as the default "
            f"pool; {_USE_EMPTY}, or before it is made create a pool by cudaMemPoolCreate with handle type "
            "cudaMemHandleTypePosixFileDescriptor (mpicomm/docs/troubles.md has the lines for CuPy), or for PyTorch "
            "set PYTORCH_CUDA_ALLOC_CONF=backend:native"
        )
    allocations: list[Allocation] = []
    at, end = pointer, pointer + array.nbytes
    while at < end:
        base, size = call(driver.cuMemGetAddressRange, at, hint=f"array does not lie on GPU {ordinal}")
        allocations.append((int(base), size))
        at = int(base) + size
    begin = allocations[0][0]
    if int(pool) == 0 and not ipc_capable and not all(can_export(base) for base, _ in allocations):
        raise InvalidUsageError(
            "array lies in virtual memory (cuMemCreate) that its allocator has not made for export as a file "
            f"descriptor; {_USE_EMPTY}, or for PyTorch set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
        )
    if max(pointer - begin, at - end) >= _ROOM_NBYTES and not _warned:
        _warned = True
        logger.warning(
            "register: the array has %d bytes and lies in an allocation of %d bytes. The whole allocation becomes "
            "visible to the peers, with all other arrays in it. Memory of comm.empty() shares nothing else",
            array.nbytes,
            at - begin,
        )
    return ("pool" if int(pool) else "ipc" if ipc_capable else "fd"), allocations


_ROOM_NBYTES = 512
"""The least memory that CuPy's and PyTorch's pools give an array. Less memory beside an array is rounding, and holds no
other data."""


_warned = False


def _other_device(device: int, ordinal: int) -> InvalidUsageError:
    return InvalidUsageError(
        f"array is on GPU {device}, but this communicator is on GPU {ordinal}: copy it there "
        f"(with cupy.cuda.Device({ordinal}): cupy.asarray(array)), or create the communicator with device={device}"
    )


def adopt_pool(context: PrimaryContext, base: int, size: int, array: Any) -> memory.CudaSegment:
    """Return the memory of ``array`` in a pool. ``base`` and ``size`` are its allocation in the pool.

    While the array lives, the pool gives this memory to no other array.
    """
    with context.current():
        # Streams order an allocation. A peer knows none of them, so the allocation has to be over before it.
        call(driver.cuCtxSynchronize)

    def export(segment: memory.CudaSegment) -> Exported:
        """Return the handle of the allocation, and a descriptor of the pool, which the caller closes."""
        attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE
        with context.current():
            pool = call(driver.cuPointerGetAttribute, attribute, base)
            with uninterrupted():  # the driver returns a descriptor as a plain number
                fd = Descriptor(call(driver.cuMemPoolExportToShareableHandle, pool, handle_type("fd"), 0))
            os.set_inheritable(fd, False)  # a child process must not keep the memory alive
            try:
                key = memory.bytes_of(call(driver.cuMemPoolExportPointer, base))
            except HandleError:
                fd.close()
                raise
        offset = array.data.ptr - base
        return ((MemoryHandle("pool", context.device.uuid, key, size, offset, segment.nbytes), fd),)

    return memory.CudaSegment(context, array.data.ptr, array.nbytes, lambda: None, export)


# A process that imports an allocation again gets the same address. The driver does not count these imports, so the
# first free would unmap the memory of all. A thread holds the lock while the driver works, so that no thread imports an
# allocation that another one is about to free.
_users: Counter[int] = Counter()
_unused_pools: list[Any] = []
_lock = threading.Lock()


def open_pool(context: PrimaryContext, handle: MemoryHandle, fd: int) -> memory.CudaSegment:
    """Map memory of a peer's pool into this process. The owner may free it only after the `close` of all peers."""

    def destroy_pool() -> None:
        # As soon as the driver permits it: it may wait for allocations of other imports.
        _unused_pools.append(pool)
        _unused_pools[:] = [each for each in _unused_pools if int(driver.cuMemPoolDestroy(each)[0]) != 0]

    def release() -> None:
        with _lock:
            _users[base] -= 1
            try:
                if not _users[base]:
                    del _users[base]
                    call(driver.cuMemFree, base)
            finally:
                destroy_pool()

    with _lock, context.current():
        pool = call(driver.cuMemPoolImportFromShareableHandle, fd, handle_type("fd"), 0)
        try:
            # At first only the GPU of the pool has access.
            call(driver.cuMemPoolSetAccess, pool, [access_for(context.device.ordinal)], 1, hint=NO_ACCESS)
            data = driver.CUmemPoolPtrExportData()
            ctypes.memmove(data.getPtr(), handle.key, KEY_NBYTES)
            base = int(call(driver.cuMemPoolImportPointer, pool, data))
        except HandleError:
            destroy_pool()
            raise
        _users[base] += 1
    return memory.CudaSegment(context, base + handle.offset, handle.nbytes, release)


class SegmentsOfGpu:
    """The part of `CudaBackend` for memory and arrays of GPU ``_ordinal``, in the context that the backend holds."""

    kinds: tuple[Kind, ...] = ("ipc", "fd", "fabric", "staged")
    """The handle kinds that the backend can allocate, best first."""
    _context: PrimaryContext
    _ordinal: int

    def asarray(self, array: Any, name: str = "array") -> Any:
        """Return ``array`` as a ``cupy.ndarray`` over the same memory.

        Raises `InvalidUsageError` with its ``name`` for an array that is not on this GPU.
        """
        if not isinstance(array, cupy.ndarray):
            with self._context.current():
                array = _convert(array, self._ordinal, name)
        if array.device.id != self._ordinal:
            raise _other_device(array.device.id, self._ordinal)
        return array

    def view(self, segment: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return a ``cupy.ndarray`` over the start of a segment, of this process or of a peer, on any device."""
        owned = cupy.cuda.UnownedMemory(segment.pointer, segment.nbytes, segment, self._ordinal)
        return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(owned, 0))

    def allocate(self, kind: Kind, nbytes: int) -> memory.CudaSegment:
        """Allocate memory in whole blocks of 2 MiB that hold nothing else."""
        with uninterrupted():
            if kind == "ipc":
                return memory.allocate_ipc(self._context, nbytes)
            if kind == "staged":
                host = HostSegment.allocate(memory.round_up(nbytes, memory.BLOCK_NBYTES))
                return memory.pinned(self._context, host, own=True)
            return VirtualSegment.allocate(self._context, kind, nbytes)

    def adopt(self, array: Any) -> memory.CudaSegment:
        """Return the memory of a C-contiguous ``cupy.ndarray``. Peers open the whole allocations that hold it."""
        if array.nbytes == 0:
            # An empty array lies in no allocation, but peers expect a handle that opens.
            segment = memory.allocate_ipc(self._context, 1)
            segment.nbytes = 0
            return segment
        with self._context.current():
            kind, allocations = allocations_of(array, self._context.device.ordinal)
        if kind == "fd":
            return adopt_virtual(self._context, allocations, array)
        ((base, size),) = allocations
        if kind == "pool":
            return adopt_pool(self._context, base, size, array)
        export = partial(memory.export_ipc, self._context, base, size, array=array)
        return memory.CudaSegment(self._context, array.data.ptr, array.nbytes, lambda: None, export)

    def export(self, segment: Any) -> Exported:
        """Return the parts of a segment of this process. The caller closes the descriptors."""
        exported: Exported = segment.export()
        return exported

    def open(self, parts: Exported) -> memory.CudaSegment:
        """Map a peer's memory. The caller still owns the descriptors, and may close them afterwards."""
        for handle, fd in parts:
            if handle.kind not in (*self.kinds, "pool"):
                raise HandleError(
                    f"a GPU communicator cannot open a {handle.kind} handle, which comes from a cpu communicator: pass "
                    "the same device= on all ranks"
                )
            if handle.kind in FD_KINDS and fd is None:
                raise HandleError(f"a {handle.kind} handle arrived without its file descriptor")
        handle, fd = parts[0]
        with uninterrupted():
            if handle.kind == "ipc":
                return memory.open_ipc(self._context, handle)
            if handle.kind == "staged":
                assert fd is not None
                return memory.pinned(self._context, HostSegment.open(fd, handle.offset, handle.nbytes), own=False)
            if handle.kind == "pool":
                assert fd is not None
                return open_pool(self._context, handle, fd)
            return VirtualSegment.open(self._context, parts)
