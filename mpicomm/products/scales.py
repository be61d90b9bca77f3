"""Scales: factors of matrices with elements of 8 bits, as PyTorch's scaled product takes them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from mpicomm.errors import InvalidUsageError

if TYPE_CHECKING:
    from mpicomm.products.libraries import Library, Multiply

_NARROW = ("float8_e4m3fn", "float8_e5m2")


class Scaling(NamedTuple):
    """The arguments of a scaled product: the factors of both matrices, and the element type of the result."""

    a: Any = None
    b: Any = None
    out_dtype: Any = None


NO_SCALING = Scaling()


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


def read_scales(
    kind: str, library: Library, scaling: Scaling, a: Any, b: Any, product: Multiply | None
) -> Scales | None:
    """Return the scales of a call; None for a product without scales. Local; raises `InvalidUsageError`."""
    dtype = library.dtype_of(a)
    if scaling == NO_SCALING:
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
    for name, scale, wanted in (("scale_a", scaling.a, (rows, 1)), ("scale_b", scaling.b, (1, columns))):
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
    result_like = a.new_empty((0, 0), dtype=scaling.out_dtype or torch.bfloat16)
    return Scales(scaling.a, scaling.b, result_like)
