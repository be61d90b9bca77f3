"""Segments of one GPU by the kind of their handle, and the private memory of a GPU."""

from __future__ import annotations

from typing import Any

from mpicomm.devices.cuda.arrays import allocations_of
from mpicomm.devices.cuda.context import PrimaryContext
from mpicomm.devices.cuda.memory import (
    CudaSegment,
    adopt_ipc,
    allocate_ipc,
    allocate_staged,
    open_ipc,
    open_staged,
)
from mpicomm.devices.cuda.virtual_memory import (
    VirtualSegment,
    adopt_virtual,
)
from mpicomm.devices.handle import FD_KINDS, Exported, Kind
from mpicomm.errors import HandleError
from mpicomm.interrupts import uninterrupted


class SegmentsOfGpu:
    """The part of `CudaBackend` for the memory of a GPU, in the context that the backend holds."""

    kinds: tuple[Kind, ...] = ("ipc", "fd", "fabric", "staged")
    """The handle kinds that the backend can allocate, best first."""
    _context: PrimaryContext

    def allocate(self, kind: Kind, nbytes: int) -> CudaSegment:
        """Allocate memory in whole blocks of 2 MiB that hold nothing else."""
        with uninterrupted():
            if kind == "ipc":
                return allocate_ipc(self._context, nbytes)
            if kind == "staged":
                return allocate_staged(self._context, nbytes)
            if kind in ("fd", "fabric"):
                return VirtualSegment.allocate(self._context, kind, nbytes)
        raise HandleError(f"handle={kind!r}: GPU memory is shared as {', '.join(self.kinds)}; use one of them")

    def adopt(self, array: Any) -> CudaSegment:
        """Return the memory of a C-contiguous ``cupy.ndarray``. Peers open the whole allocations that hold it."""
        if array.nbytes == 0:
            # An empty array lies in no allocation, but peers expect a handle that opens.
            segment = allocate_ipc(self._context, 1)
            segment.nbytes = 0
            return segment
        with self._context.current():
            kind, allocations = allocations_of(array, self._context.device.ordinal)
        if kind == "fd":
            return adopt_virtual(self._context, allocations, array)
        ((base, size),) = allocations
        return adopt_ipc(self._context, base, size, array)

    def export(self, segment: Any) -> Exported:
        """Return the parts of a segment of this process. The caller closes the descriptors."""
        exported: Exported = segment.export()
        return exported

    def open(self, parts: Exported) -> CudaSegment:
        """Map a peer's memory. The caller still owns the descriptors, and may close them afterwards."""
        for handle, fd in parts:
            if handle.kind not in self.kinds:
                raise HandleError(
                    f"a GPU communicator cannot open a {handle.kind} handle, which comes from a cpu communicator: pass "
                    "the same device= on all ranks"
                )
            if handle.kind in FD_KINDS and fd is None:
                raise HandleError(f"a {handle.kind} handle arrived without its file descriptor")
        handle, fd = parts[0]
        with uninterrupted():
            if handle.kind == "ipc":
                return open_ipc(self._context, handle)
            if handle.kind == "staged":
                assert fd is not None
                return open_staged(self._context, handle, fd)
            return VirtualSegment.open(self._context, parts)
