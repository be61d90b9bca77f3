"""The libraries that multiply: NumPy, CuPy and PyTorch. A program that passes their arrays has imported them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types

Multiply = Callable[[Any, Any, Any], object]
"""It gets two matrices and the matrix for their product, and works on the current stream of the library."""


@lru_cache
def _name_of(dtype: np.dtype[Any]) -> str:
    return str(dtype.name)  # NumPy takes several microseconds for it


@lru_cache
def _name_of_torch(dtype: Any) -> str:
    known = types.torch_dtype(dtype)
    return str(dtype) if known is None else known.name


class Library:
    """NumPy, or CuPy, whose functions have the same names: matrices, their rows, and their products. Local."""

    def __init__(self, module: Any, backend: GpuBackend | None = None) -> None:
        self.name: str = module.__name__
        self._module = module
        self._backend = backend

    def dtype_of(self, array: Any) -> str:
        """Return the name of the element type, as NumPy or ml_dtypes names it."""
        return _name_of(array.dtype)

    def device_of(self, array: Any) -> int | None:
        """Return the ordinal of the GPU; None on the host."""
        return None if self._backend is None else int(array.device.id)

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
        """Return a matrix over memory of a GPU, with the device and the element type of ``like``."""
        assert self._backend is not None
        nbytes = shape[0] * shape[1] * like.dtype.itemsize
        return self._backend.view(_Memory(pointer, nbytes), shape, like.dtype)

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
        context: AbstractContextManager[Any] = cupy_stream(self._module, stream)
        return context


def cupy_stream(cupy: Any, stream: int) -> Any:
    """Return CuPy's object for a stream that another library has made."""
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14, which warns of an ExternalStream
        return cupy.cuda.Stream.from_external(_Stream(stream))
    return cupy.cuda.ExternalStream(stream)


class _Stream:
    """A stream in CUDA's stream protocol."""

    def __init__(self, stream: int) -> None:
        self._stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the address."""
        return 0, self._stream


class _Memory:
    """Memory that others keep allocated, as a `Segment`."""

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer, self.nbytes = pointer, nbytes

    def close(self) -> None:
        """Do nothing."""


class _Torch(Library):
    """PyTorch, on the host and on GPUs."""

    def dtype_of(self, array: Any) -> str:
        return _name_of_torch(array.dtype)

    def device_of(self, array: Any) -> int | None:
        return int(array.get_device()) if array.is_cuda else None

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


NUMPY = Library(np)


def is_tensor(array: Any) -> bool:
    """Return whether ``array`` is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def library_of(
    array: Any, name: str, gpu: Callable[[], GpuBackend] | None
) -> tuple[Library, Callable[[Any, str], Any]]:
    """Return the library of a matrix, and a function that reads a matrix of that library.

    ``gpu`` opens this rank's GPU; it is None on a communicator of the host. Raises `InvalidUsageError`.
    """
    if is_tensor(array):
        return _Torch(sys.modules["torch"]), _tensor
    if gpu is None or isinstance(array, np.ndarray) or not _is_on_device(array):
        return NUMPY, _numpy
    backend = gpu()
    return Library(sys.modules["cupy"], backend), backend.asarray


def _is_on_device(array: Any) -> bool:
    return hasattr(array, "__cuda_array_interface__") or (
        hasattr(array, "__dlpack_device__") and int(array.__dlpack_device__()[0]) in (2, 13)
    )


def _tensor(array: Any, name: str) -> Any:
    if not is_tensor(array):
        raise InvalidUsageError(f"{name} is a {type(array).__name__}, and a is a tensor: pass tensors of PyTorch")
    if array.is_sparse or array.layout != sys.modules["torch"].strided:
        raise InvalidUsageError(f"{name} is a tensor without plain memory: pass {name}.to_dense()")
    return array


def _numpy(array: Any, name: str) -> Any:
    if type(array) is np.ndarray:
        return array
    if is_tensor(array) or _is_on_device(array):
        raise InvalidUsageError(f"{name} is a {type(array).__name__}, and a is a NumPy array: pass NumPy arrays")
    try:
        return np.asarray(array)
    except (TypeError, ValueError) as error:
        raise InvalidUsageError(f"{name} is no array: {error}; pass a NumPy array") from None
