"""Segments of one GPU by the kind of their handle, also memory of pools; and the private memory of a GPU."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.cuda import memory
from mpicomm.devices.cuda.arrays import allocations_of
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.virtual_memory import (
    NO_ACCESS,
    VirtualSegment,
    access_for,
    adopt_virtual,
    handle_type,
)
from mpicomm.devices.handle import FD_KINDS, KEY_NBYTES, Descriptor, Exported, Kind, MemoryHandle
from mpicomm.errors import HandleError
from mpicomm.waiting import uninterrupted


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
    """The part of `CudaBackend` for the memory of a GPU, in the context that the backend holds."""

    kinds: tuple[Kind, ...] = ("ipc", "fd", "fabric", "staged")
    """The handle kinds that the backend can allocate, best first."""
    _context: PrimaryContext

    def allocate(self, kind: Kind, nbytes: int) -> memory.CudaSegment:
        """Allocate memory in whole blocks of 2 MiB that hold nothing else."""
        with uninterrupted():
            if kind == "ipc":
                return memory.allocate_ipc(self._context, nbytes)
            if kind == "staged":
                return memory.allocate_staged(self._context, nbytes)
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
        return memory.adopt_ipc(self._context, base, size, array)

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
                return memory.open_staged(self._context, handle, fd)
            if handle.kind == "pool":
                assert fd is not None
                return open_pool(self._context, handle, fd)
            return VirtualSegment.open(self._context, parts)
