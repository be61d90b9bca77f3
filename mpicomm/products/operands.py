"""Operands: the matrices of a call, and the factors of matrices with elements of 8 bits, read and checked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import REDUCTIONS
from mpicomm.products.choose import ProductKind
from mpicomm.products.libraries import Library, Multiply, library_of

_NARROW = ("float8_e4m3fn", "float8_e5m2")


Scaling = tuple[Any, Any, Any]
"""The arguments of a scaled product: the factors of both matrices, and the element type of the result, or None."""


class Scales:
    """The factors of a product of tensors. ``a`` and ``b`` are single factors, or have one for each row or column."""

    def __init__(self, a: Any, b: Any, result_like: Any) -> None:
        self.a, self.b = a, b
        self.result_like = result_like
        self._torch: Any = sys.modules["torch"]

    def __str__(self) -> str:
        return "scaled by rows" if self.by_rows else "scaled"

    @property
    def by_rows(self) -> bool:
        """Whether each row of the left matrix has a factor. Then the factors of a shard travel with it."""
        return bool(self.a.ndim == 2 and self.a.shape[0] > 1)

    def multiply(self, a: Any, b: Any, out: Any, bias: Any, row: int) -> None:
        """Compute the product of some rows; ``row`` is the first of them in all rows."""
        factors = self.a[row : row + a.shape[0]] if self.by_rows else self.a
        self._torch._scaled_mm(a, b, scale_a=factors, scale_b=self.b, bias=bias, out_dtype=out.dtype, out=out)


@dataclass
class Operands:
    """The matrices of a call, and how the library multiplies them."""

    kind: ProductKind
    library: Library
    a: Any
    b: Any
    out: Any
    """The result. It is None if the call makes the result."""
    bias: Any
    product: Multiply | None
    gathered: Any
    """It receives the shards of all ranks, unless it is None."""
    device: int | None
    """The ordinal of the GPU; None on the host."""
    dtype: str
    result_dtype: str
    result_like: Any
    """An array with the element type of the result, on its device."""
    shape: tuple[int, int]
    """The shape of the result."""
    scales: Scales | None

    def multiply(self, a: Any, out: Any, row: int = 0) -> None:
        """Multiply some rows, with the bias if the product has to add it. ``row`` is the first row in all rows."""
        bias = self.bias if self.kind == "allgather_matmul" else None
        if self.scales is not None:
            self.scales.multiply(a, self.b, out, bias, row)
        elif self.product is None:
            self.library.multiply(a, self.b, out, bias)
        else:
            self.product(a, self.b, out)
            if bias is not None:
                out += bias

    def __post_init__(self) -> None:
        more = "".join(f", {name}" for name in ("bias", "gathered") if getattr(self, name) is not None)
        if self.scales is not None:
            more += f", {self.scales} to {self.result_dtype}"
        self.text = f"{self.kind}({self.dtype}, {_shape(self.a)} @ {_shape(self.b)}{more})"
        """The call in words: the facts in which all ranks agree."""


def read(
    kind: ProductKind,
    size: int,
    gpu: Callable[[], GpuBackend] | None,
    a: Any,
    b: Any,
    out: Any,
    bias: Any,
    product: Multiply | None,
    gathered: Any = None,
    scaling: Scaling = (None, None, None),
) -> Operands:
    """Return the operands of a call between ``size`` ranks. Local; raises `InvalidUsageError`."""
    library, as_array = library_of(a, "a", gpu)
    a, b = _matrix(kind, as_array(a, "a"), "a"), _matrix(kind, as_array(b, "b"), "b")
    dtype, device = library.dtype_of(a), library.device_of(a)
    if dtype not in REDUCTIONS or dtype == "bool":
        raise InvalidUsageError(f"{kind}: a has dtype {dtype}: pass integers, floats or complex numbers")
    rows, inner = a.shape
    if b.shape[0] != inner:
        raise InvalidUsageError(
            f"{kind}: a of shape {_shape(a)} and b of shape {_shape(b)} have no product: b must have {inner} rows"
        )
    if kind == "matmul_reduce_scatter" and rows % size:
        raise InvalidUsageError(
            f"{kind}: a has {rows} rows, and {size} ranks share them: pass a number of rows that {size} divides"
        )
    factor = {"allgather_matmul": rows * size, "matmul_reduce_scatter": rows // size, "matmul_allreduce": rows}
    shape = (factor[kind], int(b.shape[1]))
    scales = _read_scales(kind, library, scaling, a, b, product)
    result_like = a if scales is None else scales.result_like
    result_dtype = library.dtype_of(result_like)

    def checked(array: Any, name: str, wanted: tuple[int, ...], element: str) -> Any:
        if array is None:
            return None
        array = as_array(array, name)
        if tuple(array.shape) != wanted:
            raise InvalidUsageError(
                f"{kind}: {name} has shape {_shape(array)}: pass an array of shape {'x'.join(map(str, wanted))}"
            )
        if name not in ("b", "bias") and not library.is_contiguous(array):
            raise InvalidUsageError(f"{kind}: {name} of shape {_shape(array)} is not C-contiguous: pass a new array")
        if library.dtype_of(array) != element:
            whose = "a has" if element == dtype else "the result has"
            raise InvalidUsageError(
                f"{kind}: {name} has dtype {library.dtype_of(array)}, and {whose} {element}: convert {name} first"
            )
        if library.device_of(array) != device:
            here, there = ("the host" if each is None else f"GPU {each}" for each in (library.device_of(array), device))
            raise InvalidUsageError(f"{kind}: {name} is on {here}, and a is on {there}: copy {name} there")
        return array

    b = checked(b, "b", tuple(b.shape), dtype)
    out = checked(out, "out", shape, result_dtype)
    bias = checked(bias, "bias", (shape[1],), result_dtype)
    gathered = checked(gathered, "gathered", (rows * size, inner), dtype)
    if out is not None and not getattr(getattr(out, "flags", None), "writeable", True):
        raise InvalidUsageError(f"{kind}: out is read-only: pass an array that can be written")
    if product is not None and not callable(product):
        raise InvalidUsageError(f"{kind}: product={product!r} is no function: pass product(a, b, out) or leave it out")
    if product is None and library.name == "cupy" and dtype not in _OF_CUPY:
        raise InvalidUsageError(
            f"{kind}: CuPy multiplies no {dtype}: pass tensors of PyTorch, or pass product=, which multiplies"
        )
    return Operands(
        kind, library, a, b, out, bias, product, gathered, device, dtype, result_dtype, result_like, shape, scales
    )


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
    kind: str, library: Library, scaling: Scaling, a: Any, b: Any, product: Multiply | None
) -> Scales | None:
    """Return the scales of a call; None for a product without scales. Local; raises `InvalidUsageError`."""
    dtype = library.dtype_of(a)
    scale_a, scale_b, out_dtype = scaling
    if all(each is None for each in scaling):
        if dtype in _NARROW and product is None:
            raise InvalidUsageError(
                f"{kind}: a has dtype {dtype}: pass scale_a and scale_b, the float32 tensors of its factors"
            )
        return None
    if library.name != "torch" or dtype not in _NARROW or product is not None:
        raise InvalidUsageError(
            f"{kind}: scale_a, scale_b and out_dtype are for PyTorch's product of tensors with elements of 8 bits, and "
            f"a has {dtype}: leave them out"
        )
    rows, columns = int(a.shape[0]), int(b.shape[1])
    for name, scale, wanted in (("scale_a", scale_a, (rows, 1)), ("scale_b", scale_b, (1, columns))):
        if (
            scale is None
            or library.dtype_of(scale) != "float32"
            or not (scale.numel() == 1 or tuple(scale.shape) == wanted)
        ):
            said = "None" if scale is None else f"{library.dtype_of(scale)} of shape {tuple(scale.shape)}"
            raise InvalidUsageError(
                f"{kind}: {name} is {said}: pass a float32 tensor with one element, or of shape {wanted}"
            )
    torch: Any = sys.modules["torch"]
    result_like = a.new_empty((0, 0), dtype=out_dtype or torch.bfloat16)
    return Scales(scale_a, scale_b, result_like)
