"""Virtual memory of a GPU that other processes can map: allocations of ``cuMemCreate`` (fd, fabric)."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from cuda.bindings import driver

from mpicomm.devices.cuda.driver import call, check
from mpicomm.devices.cuda.memory import BLOCK_NBYTES, CudaSegment, PrimaryContext, bytes_of, cannot_allocate, round_up
from mpicomm.devices.handle import KEY_NBYTES, Descriptor, Exported, Kind, MemoryHandle
from mpicomm.errors import HandleError
from mpicomm.waiting import uninterrupted

_NO_FABRIC = (
    "fabric handles need an IMEX channel (a device node in /dev/nvidia-caps-imex-channels, readable by this user) and "
    'GPUs on an NVLink fabric; use handle="fd" or handle="ipc"'
)
NO_ACCESS = 'use handle="staged" if the GPUs cannot reach each other'
"""The way out if a device gets no access to memory."""


class VirtualSegment(CudaSegment):
    """Memory of ``cuMemCreate`` in a separate address range: the kinds ``fd`` and ``fabric``.

    Its memory can go and come back at the same addresses.
    """

    def __init__(
        self, context: PrimaryContext, kind: Kind, base: int, size: int, *, offset: int, nbytes: int, own: bool
    ) -> None:
        self._kind = kind
        self._base = base
        self._size = size
        self._own = own
        self._is_mapped = True
        super().__init__(context, base + offset, nbytes, self._unmap)

    @classmethod
    def allocate(cls, context: PrimaryContext, kind: Kind, nbytes: int) -> VirtualSegment:
        """Allocate whole blocks, in the granularity of the driver."""
        ordinal = context.device.ordinal
        with context.current():
            _require_support(ordinal, kind)
            minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
            granularity = call(driver.cuMemGetAllocationGranularity, _properties(ordinal, kind), minimum)
            size = round_up(round_up(nbytes, BLOCK_NBYTES), granularity)
            with _created(context, kind, size) as allocation:
                base = _map(ordinal, [(allocation, size)])
        return cls(context, kind, base, size, offset=0, nbytes=size, own=True)

    @classmethod
    def open(cls, context: PrimaryContext, parts: Exported) -> VirtualSegment:
        """Map a peer's allocations one after the other. The caller still owns the descriptors."""
        handles = [handle for handle, _ in parts]
        for before, after in pairwise(handles):
            if before.offset + before.nbytes != before.size or after.offset or after.kind != handles[0].kind:
                raise HandleError("the parts of a memory do not follow each other: run one mpicomm on all ranks")
        with context.current(), _imported(parts) as allocations:
            base = _map(context.device.ordinal, allocations)
        size, nbytes = (sum(getattr(handle, name) for handle in handles) for name in ("size", "nbytes"))
        return cls(context, handles[0].kind, base, size, offset=handles[0].offset, nbytes=nbytes, own=False)

    def suspend(self) -> None:
        """Give the memory back, and keep its addresses. A second call does nothing."""
        if self._is_mapped:
            with self._context.current():
                # One call unmaps all allocations of the range. An allocation goes with its last mapping.
                call(driver.cuMemUnmap, self._base, self._size)
            self._is_mapped = False

    def resume(self) -> None:
        """Take new memory of this process, with undefined contents. A second call does nothing."""
        if not self._is_mapped:
            with uninterrupted(), self._context.current(), _created(self._context, self._kind, self._size) as made:
                _map_at(self._base, self._context.device.ordinal, [(made, self._size)])
                self._is_mapped = True

    def reopen(self, parts: Exported) -> None:
        """Map a peer's new memory. The caller still owns the descriptors, and may close them afterwards."""
        size = sum(handle.size for handle, _ in parts)
        if size != self._size:
            raise HandleError(f"a peer came back with {size} bytes instead of {self._size}")
        with uninterrupted(), self._context.current(), _imported(parts) as allocations:
            _map_at(self._base, self._context.device.ordinal, allocations)
            self._is_mapped = True

    def export(self) -> Exported:
        """Return the handle, and for ``fd`` a new descriptor, which the caller closes."""
        if not self._own:
            return super().export()
        with self._context.current():
            exported = _exported(self._kind, self._base)
        key, fd = (b"", exported) if isinstance(exported, Descriptor) else (exported, None)
        return ((MemoryHandle(self._kind, self._context.device.uuid, key, self._size, 0, self.nbytes), fd),)

    def _unmap(self) -> None:
        self.suspend()
        call(driver.cuMemAddressFree, self._base, self._size)


def adopt_virtual(context: PrimaryContext, allocations: Sequence[tuple[int, int]], array: Any) -> CudaSegment:
    """Return virtual memory of ``array``, which another allocator has mapped, such as PyTorch's expandable segments.

    ``allocations`` hold the array, one after the other, each with its address and its bytes. While the array lives, its
    allocator unmaps none of them.
    """
    start, end = array.data.ptr, array.data.ptr + array.nbytes

    def export(_: CudaSegment) -> Exported:
        """Return each allocation with the range of this memory in it, and a descriptor, which the caller closes."""
        exported: list[tuple[MemoryHandle, Descriptor]] = []
        with context.current(), contextlib.ExitStack() as on_failure:
            for base, size in allocations:
                begins, ends = max(start, base), min(end, base + size)
                fd = _exported("fd", base)
                assert isinstance(fd, Descriptor)
                on_failure.callback(fd.close)
                handle = MemoryHandle("fd", context.device.uuid, b"", size, begins - base, ends - begins)
                exported.append((handle, fd))
            on_failure.pop_all()
        return tuple(exported)

    return CudaSegment(context, start, array.nbytes, lambda: None, export)


def can_export(address: int) -> bool:
    """Return whether the allocation of ``cuMemCreate`` at an address can be exported as a descriptor.

    The device's context must be current.
    """
    allocation = call(driver.cuMemRetainAllocationHandle, address)
    try:
        properties = call(driver.cuMemGetAllocationPropertiesFromHandle, allocation)
    finally:
        call(driver.cuMemRelease, allocation)
    return bool(int(properties.requestedHandleTypes) & int(handle_type("fd")))


def _exported(kind: Kind, address: int) -> Descriptor | bytes:
    """Return a new descriptor of the allocation at an address, which the caller closes, or its fabric handle."""
    owned: Callable[[Any], Any] = bytes_of if kind == "fabric" else Descriptor
    allocation = call(driver.cuMemRetainAllocationHandle, address)
    try:
        with uninterrupted():  # the driver returns a descriptor as a plain number
            exported: Descriptor | bytes = owned(
                call(driver.cuMemExportToShareableHandle, allocation, handle_type(kind), 0)
            )
    finally:
        call(driver.cuMemRelease, allocation)
    if isinstance(exported, Descriptor):
        os.set_inheritable(exported, False)  # a child process must not keep the memory alive
    return exported


@contextlib.contextmanager
def _created(context: PrimaryContext, kind: Kind, size: int) -> Iterator[Any]:
    """Give the handle of a new allocation in a ``with`` block. Afterwards only its mappings keep it alive."""
    status, allocation = driver.cuMemCreate(size, _properties(context.device.ordinal, kind), 0)
    check("cuMemCreate", status, _refused(kind, status) or cannot_allocate(size, context))
    try:
        yield allocation
    finally:
        call(driver.cuMemRelease, allocation)


@contextlib.contextmanager
def _imported(parts: Exported) -> Iterator[list[tuple[Any, int]]]:
    """Give the allocations of a peer in a ``with`` block, each with its size, as `_created` does."""
    kind = parts[0][0].kind
    allocations: list[tuple[Any, int]] = []
    with contextlib.ExitStack() as imported:
        for handle, fd in parts:
            fabric = driver.CUmemFabricHandle()
            if kind == "fabric":
                ctypes.memmove(fabric.getPtr(), handle.key, KEY_NBYTES)
            name = fabric.getPtr() if kind == "fabric" else fd
            status, allocation = driver.cuMemImportFromShareableHandle(name, handle_type(kind))
            check("cuMemImportFromShareableHandle", status, _refused(kind, status))
            imported.callback(call, driver.cuMemRelease, allocation)
            allocations.append((allocation, handle.size))
        yield allocations


def _map(ordinal: int, allocations: Sequence[tuple[Any, int]]) -> int:
    """Map allocations one after the other at new addresses; each has its handle and its size."""
    total = sum(size for _, size in allocations)
    base = int(call(driver.cuMemAddressReserve, total, 0, 0, 0))
    try:
        _map_at(base, ordinal, allocations)
    except BaseException:
        call(driver.cuMemAddressFree, base, total)
        raise
    return base


def _map_at(base: int, ordinal: int, allocations: Sequence[tuple[Any, int]]) -> None:
    """Map allocations one after the other from a reserved address on, for one device. If it raises, it maps nothing."""
    with contextlib.ExitStack() as on_failure:
        at = base
        for allocation, size in allocations:
            call(driver.cuMemMap, at, size, 0, allocation, 0)
            on_failure.callback(call, driver.cuMemUnmap, at, size)
            at += size
        call(driver.cuMemSetAccess, base, at - base, [access_for(ordinal)], 1, hint=NO_ACCESS)
        on_failure.pop_all()


def _properties(ordinal: int, kind: Kind) -> Any:
    properties = driver.CUmemAllocationProp()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = access_for(ordinal).location
    properties.requestedHandleTypes = handle_type(kind)
    return properties


def access_for(ordinal: int) -> Any:
    """Return the description of a device's access to memory: it may read and write."""
    location = driver.CUmemLocation()
    location.type, location.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, ordinal
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return access


def handle_type(kind: Kind) -> Any:
    """Return the driver's name of a handle kind."""
    types = driver.CUmemAllocationHandleType
    return types.CU_MEM_HANDLE_TYPE_FABRIC if kind == "fabric" else types.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _require_support(ordinal: int, kind: Kind) -> None:
    attribute = driver.CUdevice_attribute
    if kind == "fabric":
        if not call(driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, ordinal):
            raise HandleError(f"GPU {ordinal} does not offer fabric handles: {_NO_FABRIC}")
    elif not call(
        driver.cuDeviceGetAttribute, attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, ordinal
    ):
        raise HandleError(f'GPU {ordinal} cannot export memory as a file descriptor; use handle="ipc" or "staged"')


def _refused(kind: Kind, status: Any) -> str:
    """Return the way out if ``status`` says that the machine does not permit the kind, else an empty text."""
    if status.name not in ("CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED"):
        return ""
    return _NO_FABRIC if kind == "fabric" else 'use handle="ipc" or handle="staged"'
