"""Arrays on a GPU that are only addresses, for calls that read arguments and touch no memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


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
    from mpicomm.mpi import buffers, plain_arrays

    def read(array: Any, writable: bool, name: str) -> buffers.ArrayMemory:
        return buffers.ArrayMemory(array.data.ptr, array.nbytes, array.dtype, True, 0, array)

    monkeypatch.setitem(buffers._readers, DeviceArray, read)
    monkeypatch.setitem(plain_arrays._readers, DeviceArray, lambda array: (array.data.ptr, array.size, array.dtype))
