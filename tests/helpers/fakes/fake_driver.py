"""Arrays on a GPU without one: in host memory, for which a double of the CUDA driver answers, or only addresses."""

from __future__ import annotations

import ctypes
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.devices import memory_location

_DEVICE = 2  # CU_MEMORYTYPE_DEVICE
_ranges: dict[int, tuple[int, int]] = {}  # the address of a range, then its length and its GPU


def own(memory: npt.NDArray[Any], device: int = 0) -> None:
    """Let ``memory`` lie on a GPU as long as it lives."""
    own_range(memory.ctypes.data, memory.nbytes, device)
    weakref.finalize(memory, _ranges.pop, memory.ctypes.data, None)


def own_range(pointer: int, nbytes: int, device: int = 0) -> None:
    """Let a range of addresses lie on a GPU."""
    _install()
    _ranges[pointer] = (nbytes, device)


class _Driver:
    """The answers of `own`; for all other addresses the answers of the real driver, if there is one."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def query(self) -> Any:
        return self._answer

    def _answer(self, count: int, attributes: Any, targets: Any, pointer: int) -> int:
        for start, (nbytes, device) in _ranges.copy().items():
            if start <= pointer < start + max(nbytes, 1):
                # `memory_location` asks in this order: type, managed, ordinal, start and size of the allocation.
                for target, value in zip(targets, (_DEVICE, 0, device, start, nbytes), strict=True):
                    ctypes.c_uint64.from_address(target).value = value
                return 0
        real = self._real.query()
        return 0 if real is None else int(real(count, attributes, targets, pointer))


def _install() -> None:
    if not isinstance(memory_location._driver, _Driver):
        memory_location._driver = _Driver(memory_location._driver)  # type: ignore[assignment]


def content(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return memory of a GPU that only its address names."""
    memory = np.zeros(nbytes, np.uint8)
    own(memory)
    return memory


def interface(memory: npt.NDArray[Any], pointer: int | None = None) -> dict[str, Any]:
    """Return the CUDA array interface of memory, by default at its own address."""
    data = (memory.ctypes.data if pointer is None else pointer, False)
    return {"version": 3, "data": data, "shape": memory.shape, "typestr": memory.dtype.str}


class OnGpu:
    """An array on a GPU by its CUDA array interface. Its memory is the host's, so a test survives a call that reads it.

    It is one on the host without ``owned``.
    """

    def __init__(self, memory: npt.NDArray[Any], device: int = 0, *, owned: bool = True) -> None:
        self.memory, self.itemsize = memory, memory.itemsize
        if owned:
            own(memory, device)
        self.__cuda_array_interface__ = interface(memory, None if memory.size else 0)


class DeviceArray:
    """An array on a GPU with the attributes of CuPy's arrays; nothing reads its memory."""

    def __init__(self, pointer: int, count: int, dtype: np.dtype[Any]) -> None:
        self.data = SimpleNamespace(ptr=pointer if count else 0)  # as in CuPy and PyTorch
        self.size, self.dtype, self.itemsize = count, dtype, dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize


def read_device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package read a `DeviceArray` as it reads arrays of CuPy."""
    from mpicomm.mpi import buffers, descriptors

    def read(array: Any, writable: bool, name: str) -> buffers.ArrayMemory:
        return buffers.ArrayMemory(array.data.ptr, array.nbytes, array.dtype, True, 0, array)

    monkeypatch.setitem(buffers._readers, DeviceArray, read)
    monkeypatch.setitem(descriptors._readers, DeviceArray, lambda array: (array.data.ptr, array.size, array.dtype))
