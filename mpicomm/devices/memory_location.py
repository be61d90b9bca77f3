"""The location of the memory at an address: one query of the CUDA driver, if this process has loaded it."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any, NamedTuple

_MEMORY_TYPE, _IS_MANAGED, _ORDINAL, _RANGE_START, _RANGE_SIZE = 2, 8, 9, 11, 12  # of CUpointer_attribute
_ATTRIBUTES = (ctypes.c_int * 5)(_MEMORY_TYPE, _IS_MANAGED, _ORDINAL, _RANGE_START, _RANGE_SIZE)
_ON_DEVICE = 2  # CU_MEMORYTYPE_DEVICE

_ABSENT_S = 0.1
"""How long no driver is searched again after none was loaded. The search takes longer than a small call of MPI, and a
driver takes longer than this time to load and to start."""


class GpuLocation(NamedTuple):
    """An address in memory of a GPU."""

    device: int
    """The GPU's ordinal in this process."""
    nbytes: int
    """The bytes from the address to the end of its allocation."""
    managed: bool
    """Whether it is managed memory, which the host can access, too."""


class _Driver:
    """``cuPointerGetAttributes`` of the driver that this process has loaded, or None."""

    def __init__(self) -> None:
        self._query: Any = None
        self._absent_until = 0.0

    def query(self) -> Any:
        if self._query is None and time.monotonic() >= self._absent_until:
            try:
                # RTLD_NOLOAD: a process that has not loaded the driver has no device memory, and needs no driver.
                library = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD)
            except OSError:
                self._absent_until = time.monotonic() + _ABSENT_S
            else:
                self._query = library.cuPointerGetAttributes
                self._query.argtypes = [ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint64]
        return self._query


_driver = _Driver()


def has_driver() -> bool:
    """Return whether this process has loaded the CUDA driver: without it there is no device memory. Local."""
    return _driver.query() is not None


def locate(pointer: int) -> GpuLocation | None:
    """Return the location of an address of device memory; None for all other addresses. Local.

    Host memory is not device memory, even if it is pinned and devices can access it.
    """
    query = _driver.query()
    if query is None:
        return None
    values = (ctypes.c_uint64 * len(_ATTRIBUTES))()
    size = ctypes.sizeof(ctypes.c_uint64)
    begin = ctypes.addressof(values)
    targets = (ctypes.c_void_p * len(_ATTRIBUTES))(*(begin + size * index for index in range(len(_ATTRIBUTES))))
    # The driver writes zeros for an address that it does not know. It fails only before cuInit.
    if query(len(_ATTRIBUTES), _ATTRIBUTES, targets, pointer) != 0:
        return None
    kind, managed, ordinal, start, nbytes = values
    if not managed and kind != _ON_DEVICE:
        return None
    return GpuLocation(ordinal, start + nbytes - pointer, bool(managed))


def device_of(pointer: int) -> int | None:
    """Return the ordinal of the GPU whose memory has this address; None for host memory. Local.

    Managed memory counts as host memory, because MPI can access it.
    """
    location = locate(pointer)
    return None if location is None or location.managed else location.device
