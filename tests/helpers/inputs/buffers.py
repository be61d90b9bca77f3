"""Buffers in host or GPU memory with values that every rank knows."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import Any

import numpy as np

from tests.helpers.fakes.message_devices import DeviceArray, ThreadDevice
from tests.helpers.references.reductions import Array, samples

_GUARD = 64
ROOM_NBYTES = 2 * _GUARD
_GUARD_BYTE = 0xA5
_POOL = 1 << 16


@lru_cache(maxsize=64)
def _pool(dtype: np.dtype[Any], wild: bool) -> Array:
    rng = np.random.default_rng([zlib.crc32(dtype.name.encode()), wild])
    if wild:
        return samples(dtype, _POOL, rng)
    low = 0 if dtype.kind in "bu" else -2
    tame: Array = rng.integers(low, 2 if dtype.kind == "b" else 3, _POOL).astype(dtype)
    if dtype.kind == "c":
        tame.imag = rng.integers(-2, 3, _POOL)
    return tame


def values(dtype: np.dtype[Any], count: int, *key: int, wild: bool = False) -> Array:
    """Return the values of ``key``: small integers, whose reductions are exact in any order, or any bits."""
    pool = _pool(dtype, wild)
    start = zlib.crc32(repr(key).encode()) % (_POOL // 2)
    return pool[start : start + count].copy() if start + count <= _POOL else np.resize(pool[start:], count)


class Foreign:
    """A GPU array of a library that is neither CuPy nor PyTorch, of an element type that CuPy may lack."""

    def __init__(self, region: Any, dtype: np.dtype[Any], count: int) -> None:
        self._region = region
        self.dtype = dtype
        self.nbytes = count * dtype.itemsize
        self.__cuda_array_interface__ = {
            "shape": (count,),
            "typestr": dtype.str,
            "data": (int(region.data.ptr), False),
            "version": 3,
        }


class Placed:
    """Elements in host or GPU memory, at any address, between guards that nothing may write into.

    ``xp`` is NumPy, CuPy or a `ThreadDevice`. ``memory`` is a contiguous array in which they lie, with `ROOM_NBYTES`
    bytes more than they have and the ``offset``.
    """

    def __init__(self, xp: Any, content: Array, *, offset: int = 0, fortran: bool = False, memory: Any = None) -> None:
        self.dtype = content.dtype
        self._device = xp if isinstance(xp, ThreadDevice) else None
        self._start, self._stop = _GUARD + offset, _GUARD + offset + content.nbytes
        if memory is None:
            full = np.full if self._device else xp.full
            self._raw = full(self._stop + _GUARD, _GUARD_BYTE, np.uint8)
        else:
            self._raw = memory.view(np.uint8)[: self._stop + _GUARD]
            self._raw[:] = _GUARD_BYTE
        region = self.region = self._raw[self._start : self._stop]
        """The bytes of the elements."""
        rows = 2 if fortran and content.size % 2 == 0 else 1
        shape = (rows, content.size // rows) if fortran else (content.size,)
        self.array: Any
        if xp is np or self._device:
            self.array = region.view(content.dtype).reshape(shape, order="F")
            if self._device:
                self.array = DeviceArray(self._device, self.array, copies=False)
        elif content.dtype.isbuiltin == 1:
            self.array = xp.ndarray(shape, content.dtype, memptr=region.data, order="F")
        else:
            self.array = Foreign(region, content.dtype, content.size)
        self.set(content)

    def set(self, content: Array) -> None:
        """Overwrite the elements."""
        data = np.ascontiguousarray(content).view(np.uint8)
        if self._device:
            self._device.synchronize()
        if isinstance(self._raw, np.ndarray):
            self._raw[self._start : self._stop] = data
        elif data.size:
            import cupy

            self._raw[self._start : self._stop].set(data)
            cupy.cuda.get_current_stream().synchronize()

    def get(self) -> Array:
        """A host copy of the elements in the order in which they lie in memory; on a GPU after all its work."""
        raw = self._raw
        if self._device:
            self._device.synchronize()
        if not isinstance(raw, np.ndarray):
            import cupy

            cupy.cuda.Device().synchronize()
            raw = raw.get()
        assert (raw[: self._start] == _GUARD_BYTE).all(), "something wrote before the buffer"
        assert (raw[self._stop :] == _GUARD_BYTE).all(), "something wrote after the buffer"
        elements: Array = raw[self._start : self._stop].copy().view(self.dtype)
        return elements
