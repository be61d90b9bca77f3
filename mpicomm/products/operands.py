"""Operands: the matrices of a call, read and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mpicomm.devices.base import GpuBackend
from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import REDUCTIONS
from mpicomm.products.choose import Kind
from mpicomm.products.libraries import Library, Multiply, library_of
from mpicomm.products.scales import NO_SCALING, Scales, Scaling, read_scales


@dataclass
class Operands:
    """The matrices of a call, and how the library multiplies them."""

    kind: Kind
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
                self.library.add(out, bias)

    @cached_property
    def text(self) -> str:
        """The call in words: the facts in which all ranks agree."""
        more = "".join(f", {name}" for name in ("bias", "gathered") if getattr(self, name) is not None)
        if self.scales is not None:
            more += f", {self.scales} to {self.result_dtype}"
        return f"{self.kind}({self.dtype}, {_shape(self.a)} @ {_shape(self.b)}{more})"


def read(
    kind: Kind,
    size: int,
    gpu: Callable[[], GpuBackend] | None,
    a: Any,
    b: Any,
    out: Any,
    bias: Any,
    product: Multiply | None,
    gathered: Any = None,
    scaling: Scaling = NO_SCALING,
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
    scales = read_scales(kind, library, scaling, a, b, product)
    result_like = a if scales is None else scales.result_like
    result_dtype = library.dtype_of(result_like)

    def further(array: Any, name: str, wanted: tuple[int, ...]) -> Any:
        array = as_array(array, name)
        if tuple(array.shape) != wanted:
            raise InvalidUsageError(
                f"{kind}: {name} has shape {_shape(array)}: pass an array of shape {'x'.join(map(str, wanted))}"
            )
        if name not in ("b", "bias") and not library.is_contiguous(array):
            raise InvalidUsageError(f"{kind}: {name} of shape {_shape(array)} is not C-contiguous: pass a new array")
        return array

    if out is not None:
        out = further(out, "out", shape)
    if bias is not None:
        bias = further(bias, "bias", (shape[1],))
    if gathered is not None:
        gathered = further(gathered, "gathered", (rows * size, inner))
    for name, array in (("b", b), ("out", out), ("bias", bias), ("gathered", gathered)):
        if array is None:
            continue
        wanted = result_dtype if name in ("out", "bias") else dtype
        if library.dtype_of(array) != wanted:
            whose = "a has" if wanted == dtype else "the result has"
            raise InvalidUsageError(
                f"{kind}: {name} has dtype {library.dtype_of(array)}, and {whose} {wanted}: convert {name} first"
            )
        if library.device_of(array) != device:
            raise InvalidUsageError(
                f"{kind}: {name} is on {_place(library.device_of(array))}, and a is on {_place(device)}: copy {name} "
                "there"
            )
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


def _matrix(kind: Kind, array: Any, name: str) -> Any:
    if array.ndim != 2:
        raise InvalidUsageError(
            f"{kind}: {name} has {array.ndim} dimensions, shape {_shape(array)}: pass a matrix, such as "
            f"{name}.reshape(-1, {name}.shape[-1])"
        )
    if getattr(array, "requires_grad", False):
        import_of = "mpicomm.torch"
        raise InvalidUsageError(
            f"{kind}: {name} requires a gradient, and this call computes none: call {import_of}.{kind}, or pass "
            f"{name}.detach()"
        )
    return array


def _shape(array: Any) -> str:
    return "x".join(map(str, array.shape)) or "()"


def _place(device: int | None) -> str:
    return "the host" if device is None else f"GPU {device}"
