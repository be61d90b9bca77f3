"""Arrays on a GPU that are only addresses, for calls that read arguments and touch no memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

ORDINAL = 0


class DeviceArray:
    """An array on a GPU as CuPy's interface describes it; nothing reads its memory."""

    def __init__(self, pointer: int, count: int, dtype: np.dtype[Any]) -> None:
        self.pointer = pointer if count else 0  # as in CuPy and PyTorch
        self.size, self.dtype, self.itemsize = count, dtype, dtype.itemsize


def read_device_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package read a `DeviceArray` as it reads arrays of CuPy."""
    from mpicomm.mpi import buffers, plain_arrays

    def read(array: Any, writable: bool, name: str) -> buffers.ArrayMemory:
        nbytes = array.size * array.dtype.itemsize
        return buffers.ArrayMemory(array.pointer, nbytes, array.dtype, True, ORDINAL, array)

    monkeypatch.setitem(buffers._readers, DeviceArray, read)
    monkeypatch.setitem(plain_arrays._readers, DeviceArray, lambda array: (array.pointer, array.size, array.dtype))
