"""The libraries that multiply: NumPy, CuPy and PyTorch. A program that passes their arrays has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types

Multiply = Callable[[Any, Any, Any], object]
"""It gets two matrices and the matrix for their product, and works on the current stream of the library."""
_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged


@lru_cache  # NumPy takes several microseconds for a name
def _name_of(dtype: Any) -> str:
    known = dtype if isinstance(dtype, np.dtype) else types.torch_dtype(dtype)
    return str(dtype) if known is None else str(known.name)


class Library:
    """NumPy, or CuPy, whose functions have the same names: matrices, their rows, and their products. Local."""

    def __init__(self, module: Any, backend: GpuBackend | None = None) -> None:
        self.name: str = module.__name__
        self._module = module
        self._backend = backend

    @staticmethod
    def dtype_of(array: Any) -> str:
        """Return the name of the element type, as NumPy or ml_dtypes names it."""
        return _name_of(array.dtype)

    @staticmethod
    def device_of(array: Any) -> int | None:
        """Return the ordinal of the GPU; None on the host."""
        kind, ordinal = array.__dlpack_device__()
        return int(ordinal) if int(kind) in _DLPACK_GPU else None

    def pointer(self, array: Any) -> int:
        """Return the address of an array."""
        return int(array.ctypes.data if self._backend is None else array.data.ptr)

    def contiguous(self, array: Any) -> Any:
        """Return the array, or a copy of it in C order."""
        return self._module.ascontiguousarray(array)

    def is_contiguous(self, array: Any) -> bool:
        """Return whether an array is in C order."""
        return bool(array.flags.c_contiguous)

    def empty(self, shape: tuple[int, int], like: Any) -> Any:
        """Return a new matrix on the device of ``like``, with its element type."""
        return self._module.empty(shape, like.dtype)

    def memory(self, pointer: int, shape: tuple[int, int], like: Any) -> Any:
        """Return a matrix over memory of a GPU that others keep, with the device and the element type of ``like``."""
        assert self._backend is not None
        segment: Any = SimpleNamespace(pointer=pointer, nbytes=shape[0] * shape[1] * like.dtype.itemsize)
        return self._backend.view(segment, shape, like.dtype)

    def multiply(self, a: Any, b: Any, out: Any, bias: Any) -> None:
        """Compute ``out = a @ b + bias``; ``bias`` may be None."""
        if self._backend is None and types.is_narrow(out.dtype):
            # As GPUs do: the sums of narrow floats are in float32, and rounded once.
            total = a.astype(np.float32) @ b.astype(np.float32)
            out[...] = total if bias is None else total + bias.astype(np.float32)
            return
        self._module.matmul(a, b, out=out)
        if bias is not None:
            out += bias

    def current(self, stream: int) -> AbstractContextManager[Any]:
        """Return a ``with`` block in which the library works on a stream."""
        streams: Any = self._module.cuda
        if hasattr(streams.Stream, "from_external"):  # CuPy 14, which warns of an ExternalStream
            context: AbstractContextManager[Any] = streams.Stream.from_external(_Stream(stream))
        else:
            context = streams.ExternalStream(stream)
        return context


@dataclass(frozen=True)
class _Stream:
    """A stream in CUDA's stream protocol."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the address."""
        return 0, self.address


class _Torch(Library):
    """PyTorch, on the host and on GPUs."""

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr())

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

    def is_contiguous(self, array: Any) -> bool:
        return bool(array.is_contiguous())

    def empty(self, shape: tuple[int, int], like: Any) -> Any:
        return self._module.empty(shape, dtype=like.dtype, device=like.device)

    def memory(self, pointer: int, shape: tuple[int, int], like: Any) -> Any:
        nbytes = shape[0] * shape[1] * like.element_size()
        # In bytes, because the interface has no name for the element types that NumPy lacks.
        interface = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "strides": None, "version": 3}
        flat = self._module.as_tensor(SimpleNamespace(__cuda_array_interface__=interface), device=like.device)
        return flat.view(like.dtype).view(shape)

    def multiply(self, a: Any, b: Any, out: Any, bias: Any) -> None:
        if bias is None:
            self._module.mm(a, b, out=out)
        else:
            self._module.addmm(bias, a, b, out=out)

    def current(self, stream: int) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._module.cuda.stream(self._module.cuda.ExternalStream(stream))
        return context


def library_of(
    array: Any, name: str, gpu: Callable[[], GpuBackend] | None
) -> tuple[Library, Callable[[Any, str], Any]]:
    """Return the library of a matrix, and a function that reads a matrix of that library.

    ``gpu`` opens this rank's GPU; it is None on a communicator of the host. Raises `InvalidUsageError`.
    """
    if _is_tensor(array):
        return _Torch(sys.modules["torch"]), _tensor
    if gpu is None or isinstance(array, np.ndarray) or not _is_on_device(array):
        return Library(np), _numpy
    backend = gpu()
    return Library(sys.modules["cupy"], backend), backend.asarray


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_on_device(array: Any) -> bool:
    if hasattr(array, "__cuda_array_interface__"):
        return True
    return hasattr(array, "__dlpack_device__") and Library.device_of(array) is not None


def _tensor(array: Any, name: str) -> Any:
    if not _is_tensor(array):
        raise InvalidUsageError(f"{name} is a {type(array).__name__}, and a is a tensor: pass tensors of PyTorch")
    if array.layout != sys.modules["torch"].strided:
        raise InvalidUsageError(f"{name} is a tensor without plain memory: pass {name}.to_dense()")
    return array


def _numpy(array: Any, name: str) -> Any:
    if type(array) is np.ndarray:
        return array
    if _is_tensor(array) or _is_on_device(array):
        raise InvalidUsageError(f"{name} is a {type(array).__name__}, and a is a NumPy array: pass NumPy arrays")
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InvalidUsageError(f"{name} is no array: {error}; pass a NumPy array") from None
