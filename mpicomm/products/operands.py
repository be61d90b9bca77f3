"""The matrices of a product, read and checked, and the libraries that multiply them: NumPy, CuPy and PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import REDUCTIONS
from mpicomm.mpi import types
from mpicomm.mpi.buffers import new_array, read_in_order
from mpicomm.products.choose import ProductKind

Multiply = Callable[[Any, Any, Any], object]
"""It gets two matrices and the matrix for their product, and works on the current stream of the library."""
_DLPACK_GPU = (2, 13)  # kDLCUDA, kDLCUDAManaged


class ArrayLibrary:
    """NumPy, or CuPy, whose functions have the same names: matrices, their rows, and their products. Local."""

    def __init__(self, module: Any, backend: GpuBackend | None = None) -> None:
        self.name: str = module.__name__
        self._module = module
        self._backend = backend

    def read(self, array: Any, name: str) -> Any:
        """Return the argument ``name`` as an array of the library. Raises `InvalidUsageError` for other arrays."""
        if self._backend is not None:
            return self._backend.asarray(array, name)
        if not isinstance(array, np.ndarray):
            raise InvalidUsageError(
                f"{name} is a {type(array).__name__}: pass all arrays of NumPy, or all of CuPy, or all of PyTorch"
            )
        return array

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

    def current(self, stream: int) -> Any:
        """Return a ``with`` block in which the library works on a stream."""
        streams: Any = self._module.cuda
        if hasattr(streams.Stream, "from_external"):  # CuPy 14, which warns of an ExternalStream
            return streams.Stream.from_external(_Stream(stream))
        return streams.ExternalStream(stream)


@dataclass(frozen=True)
class _Stream:
    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of CUDA's protocol, and the address."""
        return 0, self.address


class TorchLibrary(ArrayLibrary):
    """PyTorch, on the host and on GPUs."""

    def read(self, array: Any, name: str) -> Any:
        if not _is_tensor(array):
            raise InvalidUsageError(f"{name} is a {type(array).__name__}, and a is a tensor: pass tensors of PyTorch")
        if array.layout != self._module.strided:
            raise InvalidUsageError(f"{name} is a tensor without plain memory: pass {name}.to_dense()")
        return array

    def pointer(self, array: Any) -> int:
        return int(array.data_ptr())

    def contiguous(self, array: Any) -> Any:
        return array.contiguous()

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

    def current(self, stream: int) -> Any:
        return self._module.cuda.stream(self._module.cuda.ExternalStream(stream))


def library_of(array: Any, gpu: Callable[[], GpuBackend] | None) -> ArrayLibrary:
    """Return the library of a matrix. ``gpu`` opens this rank's GPU; it is None on a communicator of the host."""
    if _is_tensor(array):
        return TorchLibrary(sys.modules["torch"])
    if gpu is None or not _is_on_device(array):
        return ArrayLibrary(np)
    backend = gpu()  # it imports CuPy
    return ArrayLibrary(sys.modules["cupy"], backend)


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_on_device(array: Any) -> bool:
    if hasattr(array, "__cuda_array_interface__"):
        return True
    return hasattr(array, "__dlpack_device__") and ArrayLibrary.device_of(array) is not None


_NARROW = ("float8_e4m3fn", "float8_e5m2")


Scaling = tuple[Any, Any, Any]
"""The arguments of a scaled product: the factors of both matrices, and the element type of the result, or None."""


class Operands:
    """The matrices of a call between ``size`` ranks, and how the library multiplies them. The constructor is local.

    ``gpu`` opens this rank's GPU; it is None on a communicator of the host. Raises `InvalidUsageError`.
    """

    def __init__(
        self,
        kind: ProductKind,
        size: int,
        gpu: Callable[[], GpuBackend] | None,
        a: Any,
        b: Any,
        out: Any,
        bias: Any,
        product: Multiply | None,
        scaling: Scaling = (None, None, None),
        gathered: Any = None,
    ) -> None:
        self.kind, self.product = kind, product
        self.library = library = library_of(a, gpu)
        self.a, b = (_matrix(kind, library.read(each, name), name) for each, name in ((a, "a"), (b, "b")))
        self.dtype = dtype = types.name_of(self.a.dtype)
        self.device = device = library.device_of(self.a)
        """The ordinal of the GPU; None on the host."""
        if dtype not in REDUCTIONS or dtype == "bool":
            raise InvalidUsageError(f"{kind}: a has dtype {dtype}: pass integers, floats or complex numbers")
        rows, inner = self.a.shape
        if b.shape[0] != inner:
            raise InvalidUsageError(
                f"{kind}: a of shape {_shape(self.a)} and b of shape {_shape(b)} have no product: b must have {inner} "
                "rows"
            )
        if kind == "matmul_reduce_scatter" and rows % size:
            raise InvalidUsageError(
                f"{kind}: a has {rows} rows, and {size} ranks share them: pass a number of rows that {size} divides"
            )
        factor = {"allgather_matmul": rows * size, "matmul_reduce_scatter": rows // size, "matmul_allreduce": rows}
        self.shape = factor[kind], int(b.shape[1])
        """The shape of the result."""
        self.scales = _read_scales(kind, library, scaling, self.a, b, product)
        """The factors of both matrices, each a single factor, or one for each row or column."""
        self.result_like = self.a
        """An array with the element type of the result, on its device."""
        if self.scales is not None:
            self.result_like = self.a.new_empty((0, 0), dtype=scaling[2] or sys.modules["torch"].bfloat16)
        self.result_dtype = types.name_of(self.result_like.dtype)

        def checked(array: Any, name: str, wanted: tuple[int, ...], element: str) -> Any:
            if array is None:
                return None
            array = library.read(array, name)
            if tuple(array.shape) != wanted:
                raise InvalidUsageError(
                    f"{kind}: {name} has shape {_shape(array)}: pass an array of shape {'x'.join(map(str, wanted))}"
                )
            if name not in ("b", "bias"):
                read_in_order(array, name == "out", f"{kind}: {name}")
            found, there = types.name_of(array.dtype), library.device_of(array)
            if found != element:
                whose = "a has" if element == dtype else "the result has"
                raise InvalidUsageError(
                    f"{kind}: {name} has dtype {found}, and {whose} {element}: convert {name} first"
                )
            if there != device:
                places = ["the host" if each is None else f"GPU {each}" for each in (there, device)]
                raise InvalidUsageError(f"{kind}: {name} is on {places[0]}, and a is on {places[1]}: copy {name} there")
            return array

        self.b = checked(b, "b", tuple(b.shape), dtype)
        self.out = checked(out, "out", self.shape, self.result_dtype)
        """The result. It is None if the call makes the result."""
        self.bias = checked(bias, "bias", (self.shape[1],), self.result_dtype)
        self.gathered = checked(gathered, "gathered", (rows * size, inner), dtype)
        """It receives the shards of all ranks, unless it is None."""
        if product is not None and not callable(product):
            raise InvalidUsageError(
                f"{kind}: product={product!r} is no function: pass product(a, b, out) or leave it out"
            )
        if product is None and library.name == "cupy" and dtype not in _OF_CUPY:
            raise InvalidUsageError(
                f"{kind}: CuPy multiplies no {dtype}: pass tensors of PyTorch, or pass product=, which multiplies"
            )
        more = "".join(f", {name}" for name in ("bias", "gathered") if getattr(self, name) is not None)
        if self.scales is not None:
            more += f", scaled{' by rows' * self.scaled_by_rows} to {self.result_dtype}"
        self.text = f"{kind}({dtype}, {_shape(self.a)} @ {_shape(self.b)}{more})"
        """The call in words: the facts in which all ranks agree."""

    @property
    def scaled_by_rows(self) -> bool:
        """Whether each row of the left matrix has a factor. Then the factors of a shard travel with it."""
        return self.scales is not None and self.scales[0].ndim == 2 and self.scales[0].shape[0] > 1

    def new_matrix(self, shape: tuple[int, int], like: Any) -> Any:
        """Return a new matrix on the device of the operands, with the element type of ``like``."""
        return new_array(like, shape, on_device=self.device is not None)

    def multiply(self, a: Any, out: Any, row: int = 0) -> None:
        """Multiply some rows, with the bias if the product has to add it. ``row`` is the first row in all rows."""
        bias = self.bias if self.kind == "allgather_matmul" else None
        if self.scales is not None:
            scale_a, scale_b = self.scales
            if self.scaled_by_rows:
                scale_a = scale_a[row : row + a.shape[0]]
            torch: Any = sys.modules["torch"]
            torch._scaled_mm(a, self.b, scale_a=scale_a, scale_b=scale_b, bias=bias, out_dtype=out.dtype, out=out)
        elif self.product is None:
            self.library.multiply(a, self.b, out, bias)
        else:
            self.product(a, self.b, out)
            if bias is not None:
                out += bias


_OF_CUPY = frozenset(REDUCTIONS) - {"bfloat16", "float8_e4m3fn", "float8_e5m2"}


def _matrix(kind: ProductKind, array: Any, name: str) -> Any:
    if array.ndim != 2:
        raise InvalidUsageError(
            f"{kind}: {name} has {array.ndim} dimensions, shape {_shape(array)}: pass a matrix, such as "
            f"{name}.reshape(-1, {name}.shape[-1])"
        )
    if getattr(array, "requires_grad", False):
        raise InvalidUsageError(
            f"{kind}: {name} requires a gradient, and this call computes none: call mpicomm.torch.{kind}, or pass "
            f"{name}.detach()"
        )
    return array


def _shape(array: Any) -> str:
    return "x".join(map(str, array.shape)) or "()"


def _read_scales(
    kind: str, library: ArrayLibrary, scaling: Scaling, a: Any, b: Any, product: Multiply | None
) -> tuple[Any, Any] | None:
    """Return the scales of a call; None for a product without scales. Local; raises `InvalidUsageError`."""
    dtype = types.name_of(a.dtype)
    scale_a, scale_b, _ = scaling
    if all(each is None for each in scaling):
        if dtype in _NARROW and product is None:
            raise InvalidUsageError(
                f"{kind}: a has dtype {dtype}: pass scale_a and scale_b, the float32 tensors of its factors"
            )
        return None
    if library.name != "torch" or dtype not in _NARROW or product is not None:
        raise InvalidUsageError(
            f"{kind}: scale_a, scale_b and out_dtype are for PyTorch's product of fp8 tensors, and "
            f"a has {dtype}: leave them out"
        )
    rows, columns = int(a.shape[0]), int(b.shape[1])
    for name, scale, wanted in (("scale_a", scale_a, (rows, 1)), ("scale_b", scale_b, (1, columns))):
        if (
            scale is None
            or types.name_of(scale.dtype) != "float32"
            or not (scale.numel() == 1 or tuple(scale.shape) == wanted)
        ):
            said = "None" if scale is None else f"{types.name_of(scale.dtype)} of shape {tuple(scale.shape)}"
            raise InvalidUsageError(
                f"{kind}: {name} is {said}: pass a float32 tensor with one element, or of shape {wanted}"
            )
    return scale_a, scale_b
