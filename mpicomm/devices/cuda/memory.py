"""GPU memory that other processes can map: CUDA IPC, and pinned host memory (staged)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.driver import DriverShutDownError, call
from mpicomm.devices.handle import KEY_NBYTES, Exported, MemoryHandle
from mpicomm.devices.host_memory import HostSegment
from mpicomm.errors import HandleError

# The driver allocates and shares whole blocks of 2 MiB. An allocation of a multiple of 2 MiB shares no block, so its
# export shows a peer nothing else.
BLOCK_NBYTES = 2 << 20

_NO_IPC = 'use handle="fd", or handle="staged" if the GPUs cannot reach each other'
_NO_STAGED = "raise the limit on locked memory (ulimit -l), or make the array smaller"
_TOO_LARGE = "make the array smaller, or free others (cupy.get_default_memory_pool().free_all_blocks())"


class CudaSegment:
    """A `Segment` that this process owns or has mapped; subclasses allocate or map it, and release it.

    Subclasses call ``__init__`` last. After it `close` may come, at the latest when the backend closes.
    """

    def __init__(self, context: PrimaryContext, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._context = context
        context.segments.add(self)

    def export(self) -> Exported:
        """Return the parts of this memory. The caller closes the descriptors."""
        raise HandleError("this memory is a peer's: only the process that owns it can export it")

    def close(self) -> None:
        """Unmap the memory, and free it if this process owns it. A second call does nothing."""
        if self not in self._context.segments:
            return
        self._context.segments.remove(self)
        with contextlib.suppress(DriverShutDownError), self._context.current():
            self._release()

    def _release(self) -> None:
        raise NotImplementedError


class IpcSegment(CudaSegment):
    """Memory of ``cuMemAlloc`` that this process shows to peers: its allocation, or memory of ``array``."""

    def __init__(
        self, context: PrimaryContext, pointer: int, nbytes: int, *, base: int, size: int, array: Any = None
    ) -> None:
        self._base = base
        self._size = size
        self._array = array  # keeps memory of the user allocated while peers may access it
        super().__init__(context, pointer, nbytes)

    @classmethod
    def allocate(cls, context: PrimaryContext, nbytes: int) -> IpcSegment:
        """Allocate at least ``nbytes`` bytes, in whole blocks."""
        size = round_up(nbytes, BLOCK_NBYTES)
        with context.current():
            base = int(call(driver.cuMemAlloc, size, hint=cannot_allocate(size, context)))
        return cls(context, base, size, base=base, size=size)

    def export(self) -> Exported:
        """Return the handle of the whole allocation, with the offset of this memory in it."""
        with self._context.current():
            key = bytes_of(call(driver.cuIpcGetMemHandle, self._base, hint=_NO_IPC))
        uuid = self._context.device.uuid
        return ((MemoryHandle("ipc", uuid, key, self._size, self.pointer - self._base, self.nbytes), None),)

    def _release(self) -> None:
        if self._array is None:
            call(driver.cuMemFree, self._base)
        self._array = None


class OpenedIpcSegment(CudaSegment):
    """IPC memory of a peer, mapped into this process."""

    def __init__(self, context: PrimaryContext, handle: MemoryHandle) -> None:
        self._key = handle.key
        super().__init__(context, _open_ipc(context, handle.key) + handle.offset, handle.nbytes)

    def _release(self) -> None:
        _close_ipc(self._context, self._key)


@dataclass
class _Mapping:
    base: int
    users: int


# A handle names an allocation, so all arrays of one block of a pool arrive with the same handle. CUDA does not say that
# one process may open a handle twice. So all communicators share one mapping per device, which its last user closes. A
# thread holds the lock while the driver works. So a second thread neither opens the handle again nor takes a mapping
# that the first thread is about to close.
_mappings: dict[tuple[int, bytes], _Mapping] = {}
_mappings_lock = threading.Lock()


def _open_ipc(context: PrimaryContext, key: bytes) -> int:
    with _mappings_lock:
        mapping = _mappings.get((context.device.ordinal, key))
        if mapping is None:
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), key, KEY_NBYTES)
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            with context.current():
                base = int(call(driver.cuIpcOpenMemHandle, handle, int(flags), hint=_NO_IPC))
            mapping = _mappings[context.device.ordinal, key] = _Mapping(base, 0)
        mapping.users += 1
        return mapping.base


def _close_ipc(context: PrimaryContext, key: bytes) -> None:
    with _mappings_lock:
        mapping = _mappings[context.device.ordinal, key]
        mapping.users -= 1
        if mapping.users == 0:
            del _mappings[context.device.ordinal, key]
            call(driver.cuIpcCloseMemHandle, mapping.base)


class StagedSegment(CudaSegment):
    """Shared host memory, of this process or of a peer, pinned for the GPU. ``pointer`` is its device address."""

    def __init__(self, context: PrimaryContext, host: HostSegment, *, own: bool) -> None:
        # This segment owns `host` from here on, and closes `host` if this raises.
        flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(host.close)
            with context.current(), contextlib.ExitStack() as pinned:
                call(driver.cuMemHostRegister, host.pointer, host.nbytes, flags, hint=_NO_STAGED)
                pinned.callback(call, driver.cuMemHostUnregister, host.pointer)
                pointer = int(call(driver.cuMemHostGetDevicePointer, host.pointer, 0))
                pinned.pop_all()
            on_failure.pop_all()
        self._host = host
        self._own = own
        super().__init__(context, pointer, host.nbytes)

    @classmethod
    def allocate(cls, context: PrimaryContext, nbytes: int) -> StagedSegment:
        """Allocate whole blocks of shared host memory and pin them."""
        return cls(context, HostSegment.allocate(round_up(nbytes, BLOCK_NBYTES)), own=True)

    @classmethod
    def open(cls, context: PrimaryContext, handle: MemoryHandle, fd: int) -> StagedSegment:
        """Map a peer's shared host memory and pin it for this process, too. The caller still owns ``fd``."""
        return cls(context, HostSegment.open(fd, handle.offset, handle.nbytes), own=False)

    def export(self) -> Exported:
        """Return the handle, and the descriptor, which the caller closes. Each segment can be exported once."""
        if not self._own:
            return super().export()
        fd = self._host.take_fd()
        return ((MemoryHandle("staged", self._context.device.uuid, b"", self.nbytes, 0, self.nbytes), fd),)

    def _release(self) -> None:
        # Unpin before the mapping goes, because the driver would keep pages pinned that no process maps.
        try:
            call(driver.cuMemHostUnregister, self._host.pointer)
        finally:
            self._host.close()


def round_up(nbytes: int, multiple: int) -> int:
    """Return the smallest multiple that holds ``nbytes`` bytes and at least one."""
    return -(-max(nbytes, 1) // multiple) * multiple


def cannot_allocate(size: int, context: PrimaryContext) -> str:
    """Return the way out if there is no memory of this size."""
    return f"the call asked for {size} bytes on GPU {context.device.ordinal}; {_TOO_LARGE}"


def bytes_of(handle: Any) -> bytes:
    """Return the bytes of an IPC handle or a fabric handle."""
    # The bindings offer an address of these opaque handles, but no accessor for their bytes.
    return ctypes.string_at(handle.getPtr(), KEY_NBYTES)
