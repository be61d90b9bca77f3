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


class SegmentsOfGpu:
    """The part of a `Backend` for the memory of a GPU, in the context that the backend holds."""

    kinds: tuple[Kind, ...] = ("ipc", "fd", "fabric", "staged")
    _context: PrimaryContext

    def allocate(self, kind: Kind, nbytes: int) -> CudaSegment:
        """Allocate memory in whole blocks of 2 MiB that hold nothing else."""
        with uninterrupted():
            if kind == "ipc":
                return IpcSegment.allocate(self._context, nbytes)
            if kind == "staged":
                return StagedSegment.allocate(self._context, nbytes)
            if kind in ("fd", "fabric"):
                return VirtualSegment.allocate(self._context, kind, nbytes)
        raise HandleError(f"handle={kind!r}: GPU memory is shared as {', '.join(self.kinds)}; use one of them")

    def adopt(self, array: Any) -> CudaSegment:
        """Return the memory of a C-contiguous ``cupy.ndarray``. Peers open the whole allocations that hold it."""
        if array.nbytes == 0:
            # An empty array lies in no allocation, but peers expect a handle that opens.
            segment = IpcSegment.allocate(self._context, 1)
            segment.nbytes = 0
            return segment
        with self._context.current():
            kind, allocations = allocations_of(array, self._context.device.ordinal)
        if kind == "fd":
            return AdoptedVirtualSegment(self._context, allocations, array)
        ((base, size),) = allocations
        if kind == "pool":
            return AdoptedPoolSegment(self._context, base, size, array)
        return IpcSegment(self._context, array.data.ptr, array.nbytes, base=base, size=size, array=array)

    def export(self, segment: Any) -> Exported:
        exported: Exported = segment.export()
        return exported

    def open(self, parts: Exported) -> CudaSegment:
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
                return OpenedIpcSegment(self._context, handle)
            if handle.kind == "staged":
                assert fd is not None
                return StagedSegment.open(self._context, handle, fd)
            if handle.kind == "pool":
                assert fd is not None
                return OpenedPoolSegment(self._context, handle, fd)
            return VirtualSegment.open(self._context, parts)
