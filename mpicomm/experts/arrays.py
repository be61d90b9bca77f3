"""Arrays of a call: their memory, and new arrays of the same library."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.buffers import read


# The class is not frozen, because every call makes some, and a frozen object takes a microsecond more to make.
@dataclass(slots=True, eq=False)
class GivenArray:
    """A C-contiguous array, read once."""

    array: Any
    pointer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    on_device: bool
    device: int | None

    def on_host(self) -> npt.NDArray[Any]:
        """Return host memory as a NumPy array."""
        return _view(self.pointer, self.shape, self.dtype, self.array)


def read_array(
    array: Any, name: str, dtypes: tuple[str, ...], shape: tuple[int | None, ...], *, writable: bool = False
) -> GivenArray:
    """Read the argument ``name``. Raises `InvalidUsageError` unless it has one of the dtypes and the shape.

    None as the first length of ``shape`` stands for any length.
    """
    memory = read(array, writable, name)
    found = tuple(array.shape)
    if found != shape and (shape[0] is not None or found[1:] != shape[1:] or not found):
        wanted = ", ".join("tokens" if length is None else str(length) for length in shape)
        raise InvalidUsageError(f"{name} has shape {found}: pass one of shape ({wanted}{',' * (len(shape) == 1)})")
    if memory.dtype is None or name_of(memory.dtype) not in dtypes:
        raise InvalidUsageError(f"{name} has dtype {memory.dtype or array.dtype}: pass one of {', '.join(dtypes)}")
    if not _is_c_contiguous(array):
        raise InvalidUsageError(f"{name} of shape {found} is not C-contiguous: copy it first")
    return GivenArray(array, memory.pointer, found, memory.dtype, memory.on_device, memory.device)


@lru_cache  # a NumPy type takes some microseconds to name
def name_of(dtype: np.dtype[Any]) -> str:
    """Return the name of a type."""
    return str(dtype.name)


def _is_c_contiguous(array: Any) -> bool:
    if hasattr(array, "is_contiguous"):
        return bool(array.is_contiguous())
    flags = getattr(array, "flags", None)
    return flags is None or bool(flags.c_contiguous)


def new_array(like: Any, shape: tuple[int, ...], dtype: np.dtype[Any], *, on_device: bool) -> Any:
    """Return a new array of the library of ``like``, in the same place. Other libraries than PyTorch get CuPy's."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        return torch.empty(shape, dtype=getattr(torch, dtype.name), device=like.device)
    if on_device:
        # The backend of a GPU has imported CuPy, which has no floats of 8 bits.
        return sys.modules["cupy"].empty(shape, dtype if name_of(dtype) != "float8_e4m3fn" else np.uint8)
    return np.empty(shape, dtype)


def pointer_of(array: Any) -> int:
    """Return the address of an array that `new_array` has made."""
    return read(array, True, "array").pointer


def host_view(array: Any) -> npt.NDArray[Any]:
    """Return an array of `new_array` in host memory as a NumPy array."""
    memory = read(array, True, "array")
    assert memory.dtype is not None
    return _view(memory.pointer, tuple(array.shape), memory.dtype, array)


def _view(pointer: int, shape: tuple[int, ...], dtype: np.dtype[Any], owner: Any) -> npt.NDArray[Any]:
    # NumPy's array interface has no name for bfloat16.
    nbytes = math.prod(shape) * dtype.itemsize
    return array_at(pointer, nbytes, np.dtype(np.uint8), owner).view(dtype).reshape(shape)
