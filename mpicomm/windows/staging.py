"""Staging: scratch memory of a device for buffers of this rank that kernels cannot access as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.layout import DatatypeLayout
from mpicomm.windows.buffers import LocalBuffer
from mpicomm.windows.steps import Steps

_LINE_NBYTES = 128
_BYTE = np.dtype(np.uint8)


class Staging:
    """Packs buffers into scratch memory of a device, and unpacks them."""

    def __init__(self, backend: GpuBackend, steps: Steps) -> None:
        self._backend = backend
        self._steps = steps

    def packed(self, local: LocalBuffer, stream: int, place: int = 0) -> int:
        """Return the address of the elements of a buffer, one after the other, in memory of the device.

        That is the address of the buffer if it is so already, else ``place`` or scratch memory.
        """
        layout, backend = local.elements.layout, self._backend
        if local.on_device and layout is None and not place:
            return local.pointer
        place = place or self._steps.scratch(local.nbytes, stream)
        if layout is None:
            backend.copy(place, local.pointer, local.nbytes, stream)
        elif local.on_device:
            self._steps.gather(layout, local.pointer, place, stream)
        else:
            self._require_no_capture(local, stream)
            # CUDA reads pageable memory before the call returns, so the staging memory may go afterwards.
            staging = np.empty(local.nbytes, np.uint8)
            gather(layout, local.pointer, staging.ctypes.data)
            backend.copy(place, staging.ctypes.data, local.nbytes, stream)
        return place

    def unpack(self, local: LocalBuffer, source: int, stream: int) -> None:
        """Copy elements that lie one after the other in memory of a device into a buffer. Blocking for host memory."""
        layout, backend = local.elements.layout, self._backend
        if not local.on_device:
            self._require_no_capture(local, stream)
            staging = None if layout is None else np.empty(local.nbytes, np.uint8)
            backend.copy(local.pointer if staging is None else staging.ctypes.data, source, local.nbytes, stream)
            backend.synchronize(stream)
            if layout is not None and staging is not None:
                scatter(layout, local.pointer, staging.ctypes.data)
        elif layout is None:
            backend.copy(local.pointer, source, local.nbytes, stream)
        else:
            self._steps.scatter(layout, local.pointer, source, stream)

    def places(self, buffers: Sequence[LocalBuffer | None], itemsize: int, stream: int) -> list[int]:
        """Return a place in scratch memory for each buffer whose elements kernels cannot access as they lie, else 0."""
        sizes = [0] * len(buffers)
        for number, each in enumerate(buffers):
            if each is not None:
                lies_ready = each.on_device and each.elements.layout is None and each.pointer % itemsize == 0
                sizes[number] = 0 if lies_ready else -(-each.nbytes // _LINE_NBYTES) * _LINE_NBYTES
        if not any(sizes):
            return sizes
        start = self._steps.scratch(sum(sizes), stream)
        return [start + sum(sizes[:number]) if size else 0 for number, size in enumerate(sizes)]

    def _require_no_capture(self, local: LocalBuffer, stream: int) -> None:
        if self._backend.is_capturing(stream):
            raise InvalidUsageError(
                f"{local.name} is in host memory, which the host copies only once: pass a device array to a captured "
                "call"
            )


def gather(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Pack elements in host memory, which lie from ``memory`` on, to ``packed``.

    MPI's Pack would leave out the gaps in pairs of a value and an index, which updates of whole pairs need.
    """
    array_at(packed, layout.nbytes, _BYTE)[:] = _reached(layout, memory)[_places_of(layout)]


def scatter(layout: DatatypeLayout, memory: int, packed: int) -> None:
    """Unpack elements in host memory from ``packed`` to their places from ``memory`` on."""
    _reached(layout, memory)[_places_of(layout)] = array_at(packed, layout.nbytes, _BYTE)


def _reached(layout: DatatypeLayout, memory: int) -> npt.NDArray[np.uint8]:
    return array_at(memory + layout.begin, layout.end - layout.begin, _BYTE)


@lru_cache(maxsize=16)  # a place takes eight bytes
def _places_of(layout: DatatypeLayout) -> npt.NDArray[np.int64]:
    """Return the place of each packed byte, in bytes from the first byte that the elements touch."""
    places = np.empty(layout.nbytes, np.int64)
    for region in layout.regions:
        begins: Any = np.array([region.offset - layout.begin])
        packed: Any = np.array([region.packed])
        for loop in region.loops:
            rounds = np.arange(loop.rounds)
            steps = loop.listed() if loop.places else rounds * loop.stride
            begins = (begins[:, None] + steps).ravel()
            packed = (packed[:, None] + rounds * loop.packed).ravel()
        run = np.arange(region.run_nbytes)
        places[(packed[:, None] + run).ravel()] = (begins[:, None] + run).ravel()
    return places
