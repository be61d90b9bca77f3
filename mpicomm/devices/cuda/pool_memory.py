"""Memory of stream-ordered pools (``cudaMallocAsync``) that were made for export as a file descriptor."""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import call
from mpicomm.devices.cuda.memory import CudaSegment, bytes_of
from mpicomm.devices.cuda.virtual_memory import NO_ACCESS, access_for, handle_type
from mpicomm.devices.descriptor import Descriptor
from mpicomm.devices.handle import KEY_NBYTES, Exported, MemoryHandle
from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted


class AdoptedPoolSegment(CudaSegment):
    """Memory of ``array`` in a pool. ``base`` and ``size`` are its allocation in the pool."""

    def __init__(self, context: PrimaryContext, base: int, size: int, array: Any) -> None:
        self._base = base
        self._size = size
        # While the array lives, the pool gives this memory to no other array.
        self._array = array
        with context.current():
            # Streams order an allocation. A peer knows none of them, so the allocation has to be over before it.
            call(driver.cuCtxSynchronize)
        super().__init__(context, array.data.ptr, array.nbytes)

    def export(self) -> Exported:
        """Return the handle of the allocation, and a descriptor of the pool, which the caller closes."""
        with self._context.current():
            fd = _exported(_pool_of(self._base))
            try:
                key = bytes_of(call(driver.cuMemPoolExportPointer, self._base))
            except HandleError:
                fd.close()
                raise
        uuid, offset = self._context.device.uuid, self.pointer - self._base
        return ((MemoryHandle("pool", uuid, key, self._size, offset, self.nbytes), fd),)

    def _release(self) -> None:
        self._array = None


class OpenedPoolSegment(CudaSegment):
    """Memory of a peer's pool, mapped into this process. The owner may free it only after the `close` of all peers."""

    def __init__(self, context: PrimaryContext, handle: MemoryHandle, fd: int) -> None:
        with _lock, context.current():
            self._pool = call(driver.cuMemPoolImportFromShareableHandle, fd, handle_type("fd"), 0)
            try:
                # At first only the GPU of the pool has access.
                call(driver.cuMemPoolSetAccess, self._pool, [access_for(context.device.ordinal)], 1, hint=NO_ACCESS)
                data = driver.CUmemPoolPtrExportData()
                ctypes.memmove(data.getPtr(), handle.key, KEY_NBYTES)
                self._base = int(call(driver.cuMemPoolImportPointer, self._pool, data))
            except HandleError:
                _destroy(self._pool)
                raise
            _users[self._base] += 1
        super().__init__(context, self._base + handle.offset, handle.nbytes)

    def _release(self) -> None:
        with _lock:
            _users[self._base] -= 1
            try:
                if not _users[self._base]:
                    del _users[self._base]
                    call(driver.cuMemFree, self._base)
            finally:
                _destroy(self._pool)


# A process that imports an allocation again gets the same address. The driver does not count these imports, so the
# first free would unmap the memory of all. A thread holds the lock while the driver works, so that no thread imports an
# allocation that another one is about to free.
_users: Counter[int] = Counter()
_unused_pools: list[Any] = []
_lock = threading.Lock()


def _destroy(pool: Any) -> None:
    """Destroy an imported pool as soon as the driver permits it: it may wait for allocations of other imports."""
    _unused_pools.append(pool)
    _unused_pools[:] = [each for each in _unused_pools if int(driver.cuMemPoolDestroy(each)[0]) != 0]


def _pool_of(address: int) -> Any:
    return call(driver.cuPointerGetAttribute, driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address)


def _exported(pool: Any) -> Descriptor:
    """Return a new descriptor of a pool, which the caller closes."""
    with uninterrupted():  # the driver returns a descriptor as a plain number
        fd = Descriptor(call(driver.cuMemPoolExportToShareableHandle, pool, handle_type("fd"), 0))
    os.set_inheritable(fd, False)  # a child process must not keep the memory alive
    return fd
