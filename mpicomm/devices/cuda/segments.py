"""Segments of one GPU by the kind of their handle: new memory, memory of the user, and memory of peers."""

from __future__ import annotations

from typing import Any

from mpicomm.devices.cuda.arrays import allocations_of
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.memory import CudaSegment, IpcSegment, OpenedIpcSegment, StagedSegment
from mpicomm.devices.cuda.pool_memory import AdoptedPoolSegment, OpenedPoolSegment
from mpicomm.devices.cuda.virtual_memory import AdoptedVirtualSegment, VirtualSegment
from mpicomm.devices.handle import FD_KINDS, Exported, Kind
from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted

KINDS: tuple[Kind, ...] = ("ipc", "fd", "fabric", "staged")
"""The kinds of handles of GPU memory, best first."""


def allocate(context: PrimaryContext, kind: Kind, nbytes: int) -> CudaSegment:
    """Allocate memory in whole blocks of 2 MiB that hold nothing else. Local."""
    with uninterrupted():
        if kind == "ipc":
            return IpcSegment.allocate(context, nbytes)
        if kind == "staged":
            return StagedSegment.allocate(context, nbytes)
        if kind in ("fd", "fabric"):
            return VirtualSegment.allocate(context, kind, nbytes)
    raise HandleError(f"handle={kind!r}: GPU memory is shared as {', '.join(KINDS)}; use one of them")


def adopt(context: PrimaryContext, array: Any) -> CudaSegment:
    """Return the memory of a C-contiguous ``cupy.ndarray``. Peers open the whole allocations that hold it. Local."""
    if array.nbytes == 0:
        # An empty array lies in no allocation, but peers expect a handle that opens.
        segment = IpcSegment.allocate(context, 1)
        segment.nbytes = 0
        return segment
    with context.current():
        kind, allocations = allocations_of(array, context.device.ordinal)
    if kind == "fd":
        return AdoptedVirtualSegment(context, allocations, array)
    ((base, size),) = allocations
    if kind == "pool":
        return AdoptedPoolSegment(context, base, size, array)
    return IpcSegment(context, array.data.ptr, array.nbytes, base=base, size=size, array=array)


def open_parts(context: PrimaryContext, parts: Exported) -> CudaSegment:
    """Map a peer's memory for this GPU. Local. The caller still owns the descriptors."""
    for handle, fd in parts:
        if handle.kind not in (*KINDS, "pool"):
            raise HandleError(
                f"a GPU communicator cannot open a {handle.kind} handle, which comes from a cpu communicator: pass the "
                "same device= on all ranks"
            )
        if handle.kind in FD_KINDS and fd is None:
            raise HandleError(f"a {handle.kind} handle arrived without its file descriptor")
    handle, fd = parts[0]
    with uninterrupted():
        if handle.kind == "ipc":
            return OpenedIpcSegment(context, handle)
        if handle.kind == "staged":
            assert fd is not None
            return StagedSegment.open(context, handle, fd)
        if handle.kind == "pool":
            assert fd is not None
            return OpenedPoolSegment(context, handle, fd)
        return VirtualSegment.open(context, parts)
