"""Staging: scratch memory of a device for buffers of this rank that kernels cannot access as they lie."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.windows import host_steps
from mpicomm.windows.buffers import LocalBuffer
from mpicomm.windows.steps import Steps

_LINE_NBYTES = 128


class Staging:
    """Packs buffers into scratch memory, and unpacks them. ``gpu`` is None for windows of host memory."""

    def __init__(self, gpu: GpuBackend | None, steps: Steps) -> None:
        self._gpu = gpu
        self.steps = steps

    def reaches(self, local: LocalBuffer) -> bool:
        """Return whether kernels of this device, or NumPy on the host, access a buffer of this rank."""
        return local.on_device or self._gpu is None

    def packed(self, local: LocalBuffer, stream: int, place: int = 0) -> int:
        """Return the address of the elements of a buffer, one after the other, in memory of the device.

        That is the address of the buffer if it is so already, else ``place`` or scratch memory.
        """
        layout = local.elements.layout
        if self.reaches(local) and layout is None and not place:
            return local.pointer
        place = place or self.steps.scratch(local.nbytes, stream)
        if self._gpu is not None and not local.on_device:
            _copy_to_device(self._gpu, local, place, stream)
        elif layout is None:
            self.steps.copy(place, local.pointer, local.nbytes, stream)
        else:
            self.steps.gather(layout, local.pointer, place, stream)
        return place

    def unpack(self, local: LocalBuffer, source: int, stream: int) -> None:
        """Copy elements that lie one after the other in memory of a device into a buffer."""
        layout = local.elements.layout
        if self._gpu is not None and not local.on_device:
            _copy_from_device(self._gpu, local, source, stream)
        elif layout is None:
            self.steps.copy(local.pointer, source, local.nbytes, stream)
        else:
            self.steps.scatter(layout, local.pointer, source, stream)

    def places(self, buffers: Sequence[LocalBuffer | None], itemsize: int, stream: int) -> list[int]:
        """Return a place in scratch memory for each buffer whose elements kernels cannot access as they lie, else 0."""
        sizes = [
            0 if each is None or self._lies_ready(each, itemsize) else -(-each.nbytes // _LINE_NBYTES) * _LINE_NBYTES
            for each in buffers
        ]
        if not any(sizes):
            return [0] * len(sizes)
        start = self.steps.scratch(sum(sizes), stream)
        return [start + sum(sizes[:number]) if size else 0 for number, size in enumerate(sizes)]

    def _lies_ready(self, local: LocalBuffer, itemsize: int) -> bool:
        aligned = self._gpu is None or local.pointer % itemsize == 0
        return self.reaches(local) and local.elements.layout is None and aligned


def _copy_to_device(backend: GpuBackend, local: LocalBuffer, place: int, stream: int) -> None:
    """Copy the elements of a buffer to ``place`` on the device, in the order of the stream."""
    layout = local.elements.layout
    if layout is None:
        backend.copy(place, local.pointer, local.nbytes, stream)
        return
    _require_no_capture(backend, local, stream)
    # Not pinned memory: CUDA reads pageable memory before the call returns, so the staging memory may go afterwards.
    staging = np.empty(local.nbytes, np.uint8)
    host_steps.gather(layout, local.pointer, staging.ctypes.data)
    backend.copy(place, staging.ctypes.data, local.nbytes, stream)


def _copy_from_device(backend: GpuBackend, local: LocalBuffer, source: int, stream: int) -> None:
    """Copy elements from ``source`` on the device into a buffer. Blocking."""
    _require_no_capture(backend, local, stream)
    layout = local.elements.layout
    staging = None if layout is None else np.empty(local.nbytes, np.uint8)
    backend.copy(local.pointer if staging is None else staging.ctypes.data, source, local.nbytes, stream)
    backend.synchronize(stream)
    if layout is not None and staging is not None:
        host_steps.scatter(layout, local.pointer, staging.ctypes.data)


def _require_no_capture(backend: GpuBackend, local: LocalBuffer, stream: int) -> None:
    if backend.is_capturing(stream):
        raise InvalidUsageError(
            f"{local.name} is in host memory, which the host copies only once: pass a device array to a captured call"
        )
