"""The primary context of a device, and its memory that other processes can map: CUDA IPC, and pinned (staged)."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.base import DeviceInfo
from mpicomm.devices.cuda.driver import DriverShutDownError, call
from mpicomm.devices.handle import KEY_NBYTES, Exported, MemoryHandle
from mpicomm.devices.host_memory import HostSegment
from mpicomm.errors import HandleError


class PrimaryContext:
    """The context of one device that CuPy, PyTorch and the CUDA runtime use, too. It lives until `release`."""

    def __init__(self, device: DeviceInfo) -> None:
        from cupy.cuda import driver as cupy_driver  # not above: faults.py imports this module without CuPy, too

        self.device = device
        self.segments: set[CudaSegment] = set()
        """The open segments. A Ctrl-C may leave the last reference to a segment here: see `CudaBackend.close`."""
        self._driver = cupy_driver
        self._context = int(call(driver.cuDevicePrimaryCtxRetain, device.ordinal))

    def current(self) -> contextlib.AbstractContextManager[None]:
        """Return a ``with`` block in which this context is current on the calling thread."""
        return CurrentContext(self._context, self._driver)

    def is_current(self) -> bool:
        """Return whether this context is current on the calling thread."""
        try:
            return bool(self._driver.ctxGetCurrent() == self._context)
        except self._driver.CUDADriverError:  # a thread that has not used CUDA
            return False

    def release(self) -> None:
        """Release the context, once; it lives on while others use it."""
        with contextlib.suppress(DriverShutDownError):
            call(driver.cuDevicePrimaryCtxRelease, self.device.ordinal)


class CurrentContext(contextlib.AbstractContextManager[None]):
    """A ``with`` block in which a context is current on the calling thread. Its end restores the previous context.

    ``cupy_driver`` is ``cupy.cuda.driver``.
    """

    # Every device call goes through here, so speed counts. A generator takes longer than all this code, and the
    # driver's binding takes ten times as long as CuPy's functions.
    __slots__ = ("_before", "_context", "_driver")

    def __init__(self, context: int, cupy_driver: Any) -> None:
        self._driver = cupy_driver
        self._context = context
        self._before = context

    def __enter__(self) -> None:
        try:
            self._before = self._driver.ctxGetCurrent()  # 0 on a thread that has not used CUDA
            if self._before != self._context:
                self._driver.ctxSetCurrent(self._context)
        except self._driver.CUDADriverError as error:
            if int(error.status) == int(driver.CUresult.CUDA_ERROR_DEINITIALIZED):
                raise DriverShutDownError(str(error)) from None
            raise HandleError(f"the context of a GPU cannot be made current: {error}") from None

    def __exit__(self, *_: object) -> None:
        if self._before != self._context:
            self._driver.ctxSetCurrent(self._before)


# The driver allocates and shares whole blocks of 2 MiB. An allocation of a multiple of 2 MiB shares no block, so its
# export shows a peer nothing else.
BLOCK_NBYTES = 2 << 20

_NO_IPC = 'use handle="fd", or handle="staged" if the GPUs cannot reach each other'
_NO_STAGED = "raise the limit on locked memory (ulimit -l), or make the array smaller"
_TOO_LARGE = "make the array smaller, or free others (cupy.get_default_memory_pool().free_all_blocks())"


class CudaSegment:
    """Memory of a GPU that this process owns, or a peer's that it has mapped. It is there already.

    ``release`` frees or unmaps it, in the context of the device, when `close` comes: at the latest when the backend
    closes. ``export`` returns the parts of this segment. Without it the memory is a peer's. Both keep memory of the
    user allocated while peers may access it.
    """

    def __init__(
        self,
        context: PrimaryContext,
        pointer: int,
        nbytes: int,
        release: Callable[[], object],
        export: Callable[[CudaSegment], Exported] | None = None,
    ) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._context = context
        self._release = release
        self._export = export
        context.segments.add(self)

    def export(self) -> Exported:
        """Return the parts of this memory. The caller closes the descriptors."""
        if self._export is None:
            raise HandleError("this memory is a peer's: only the process that owns it can export it")
        return self._export(self)

    def close(self) -> None:
        """Unmap the memory, and free it if this process owns it. A second call does nothing."""
        if self not in self._context.segments:
            return
        self._context.segments.remove(self)
        release, self._release, self._export = self._release, lambda: None, None
        with contextlib.suppress(DriverShutDownError), self._context.current():
            release()


def allocate_ipc(context: PrimaryContext, nbytes: int) -> CudaSegment:
    """Allocate at least ``nbytes`` bytes by ``cuMemAlloc``, in whole blocks."""
    size = round_up(nbytes, BLOCK_NBYTES)
    with context.current():
        base = int(call(driver.cuMemAlloc, size, hint=cannot_allocate(size, context)))
    export = partial(export_ipc, context, base, size)
    return CudaSegment(context, base, size, partial(call, driver.cuMemFree, base), export)


def export_ipc(context: PrimaryContext, base: int, size: int, segment: CudaSegment, array: Any = None) -> Exported:
    """Return the handle of a whole allocation of ``cuMemAlloc``, with the offset of the segment in it.

    It has ``size`` bytes at ``base``. A function that holds ``array`` keeps memory of the user allocated.
    """
    with context.current():
        key = bytes_of(call(driver.cuIpcGetMemHandle, base, hint=_NO_IPC))
    return ((MemoryHandle("ipc", context.device.uuid, key, size, segment.pointer - base, segment.nbytes), None),)


# A handle names an allocation, so all arrays of one block of a pool arrive with the same handle. CUDA does not say that
# one process may open a handle twice. So all communicators share one mapping per device, which its last user closes. A
# thread holds the lock while the driver works. So a second thread neither opens the handle again nor takes a mapping
# that the first thread is about to close.
_mappings: dict[tuple[int, bytes], list[int]] = {}
"""The address of each mapping, and the number of its users."""
_mappings_lock = threading.Lock()


def open_ipc(context: PrimaryContext, handle: MemoryHandle) -> CudaSegment:
    """Map IPC memory of a peer into this process."""
    key = context.device.ordinal, handle.key

    def release() -> None:
        with _mappings_lock:
            mapping = _mappings[key]
            mapping[1] -= 1
            if mapping[1] == 0:
                del _mappings[key]
                call(driver.cuIpcCloseMemHandle, mapping[0])

    with _mappings_lock:
        if key not in _mappings:
            name = driver.CUipcMemHandle()
            ctypes.memmove(name.getPtr(), handle.key, KEY_NBYTES)
            flags = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
            with context.current():
                _mappings[key] = [int(call(driver.cuIpcOpenMemHandle, name, int(flags), hint=_NO_IPC)), 0]
        _mappings[key][1] += 1
        base = _mappings[key][0]
    return CudaSegment(context, base + handle.offset, handle.nbytes, release)


def pinned(context: PrimaryContext, host: HostSegment, *, own: bool) -> CudaSegment:
    """Pin shared host memory for the GPU; the address is its device address. An error closes the memory.

    ``own`` is whether it is memory of this process, and not of a peer.
    """
    flags = driver.CU_MEMHOSTREGISTER_PORTABLE | driver.CU_MEMHOSTREGISTER_DEVICEMAP
    with contextlib.ExitStack() as on_failure:
        on_failure.callback(host.close)
        with context.current(), contextlib.ExitStack() as unpin:
            call(driver.cuMemHostRegister, host.pointer, host.nbytes, flags, hint=_NO_STAGED)
            unpin.callback(call, driver.cuMemHostUnregister, host.pointer)
            pointer = int(call(driver.cuMemHostGetDevicePointer, host.pointer, 0))
            unpin.pop_all()
        on_failure.pop_all()

    def release() -> None:
        # Unpin before the mapping goes, because the driver would keep pages pinned that no process maps.
        try:
            call(driver.cuMemHostUnregister, host.pointer)
        finally:
            host.close()

    def export(segment: CudaSegment) -> Exported:
        fd = host.take_fd()  # each segment can be exported once
        return ((MemoryHandle("staged", context.device.uuid, b"", segment.nbytes, 0, segment.nbytes), fd),)

    return CudaSegment(context, pointer, host.nbytes, release, export if own else None)


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
