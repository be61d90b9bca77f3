"""Copies between a device and buffers of this rank in host memory."""

from __future__ import annotations

import numpy as np

from mpicomm.devices.base import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.windows import host_layouts
from mpicomm.windows.buffers import LocalBuffer


def copy_to_device(backend: GpuBackend, local: LocalBuffer, place: int, stream: int) -> None:
    """Copy the elements of a buffer to ``place`` on the device, in the order of the stream."""
    layout = local.elements.layout
    if layout is None:
        backend.copy(place, local.pointer, local.nbytes, stream)
        return
    _require_no_capture(backend, local, stream)
    # Not pinned memory: CUDA reads pageable memory before the call returns, so the staging memory may go afterwards.
    staging = np.empty(local.nbytes, np.uint8)
    host_layouts.gather(layout, local.pointer, staging.ctypes.data)
    backend.copy(place, staging.ctypes.data, local.nbytes, stream)


def copy_from_device(backend: GpuBackend, local: LocalBuffer, source: int, stream: int) -> None:
    """Copy elements from ``source`` on the device into a buffer. Blocking."""
    _require_no_capture(backend, local, stream)
    layout = local.elements.layout
    staging = None if layout is None else np.empty(local.nbytes, np.uint8)
    backend.copy(local.pointer if staging is None else staging.ctypes.data, source, local.nbytes, stream)
    backend.synchronize(stream)
    if layout is not None and staging is not None:
        host_layouts.scatter(layout, local.pointer, staging.ctypes.data)


def _require_no_capture(backend: GpuBackend, local: LocalBuffer, stream: int) -> None:
    if backend.is_capturing(stream):
        raise InvalidUsageError(
            f"{local.name} is in host memory, which the host copies only once: pass a device array to a captured call"
        )
