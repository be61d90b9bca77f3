"""Epilogues: functions that an all-reduce applies to its result before it stores the result.

``comm.Allreduce(x, y, epilogue=mpicomm.epilogues.rms_norm(residual, weight))``. ``epilogue`` also takes an expression.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mpicomm.epilogues.base import BoundEpilogue, Epilogue
from mpicomm.epilogues.elementwise import Elementwise, number_of
from mpicomm.epilogues.norm import RmsNorm
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand

__all__ = ["Elementwise", "Epilogue", "fp8", "rms_norm"]


def fp8(scale: Any, dtype: str = "float8_e4m3fn") -> Epilogue:
    """Return the epilogue that multiplies by ``scale`` and converts to 8 bits, with saturation. Local.

    NaN stays NaN. ``scale`` is a number, or an array of one element on the device of the result. The array may change
    between replays of a CUDA graph. ``recvbuf`` has elements of ``dtype``: "float8_e4m3fn" or "float8_e5m2". A call
    with another ``recvbuf`` raises `InvalidUsageError`.
    """
    return _ToEightBits(scale, dtype)


class _ToEightBits(Elementwise):
    """See `fp8`."""

    def __init__(self, scale: Any, dtype: str) -> None:
        largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype)
        if largest is None:
            raise InvalidUsageError(f"dtype={dtype!r} is no float of 8 bits: use float8_e4m3fn or float8_e5m2")
        factor = "scale[0]" if number_of(scale) is None else "scale"
        super().__init__(f"max(min(v * {factor}, {largest}), -{largest})", scale=scale)
        self._dtype = dtype

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """See `Epilogue`."""
        assert result.dtype is not None
        if result.dtype.name != self._dtype:
            raise InvalidUsageError(
                f"{operation}: epilogue=fp8(..., dtype={self._dtype!r}): {result.name} has {result.dtype}: pass one of "
                f"{self._dtype}, or another dtype to fp8"
            )
        return super().bind(operation, dtype, result)


def rms_norm(residual: Any, weight: Any, eps: float = 1e-6) -> Epilogue:
    """Return the epilogue that adds ``residual`` to the result and normalises its rows, as layers of a model do. Local.

    The elements are floats, and a row has as many elements as ``weight``. h = result + residual; residual becomes h;
    recvbuf becomes h / sqrt(mean of h * h over the row + eps) * weight. The computation is in float32, or in float64
    for float64. h is rounded to the type of ``sendbuf``, and residual also has this type. The three arrays share no
    memory, and residual shares none with ``sendbuf``. In "one_shot" on GPUs the kernel that reduces computes it, for
    rows of up to 32 KiB that are whole numbers of 16 bytes. In other calls on GPUs one more kernel follows and computes
    it, because several ranks may reduce parts of a row.
    """
    return RmsNorm(residual, weight, eps)


def as_epilogue(given: Any, operands: dict[str, Any]) -> Epilogue | None:
    """Return the epilogue of a call from its argument ``epilogue`` and its other keywords; None without both."""
    if given is None and not operands:
        return None
    if given is None:
        raise TypeError(f"{', '.join(operands)}: no argument of the call has this name, and there is no epilogue=")
    if isinstance(given, str):
        return Elementwise(given, **operands)
    if not isinstance(given, Epilogue):
        raise TypeError(f"epilogue={given!r} is no epilogue: pass an expression, or one of mpicomm.epilogues")
    if operands:
        raise TypeError(f"{', '.join(operands)}: operands are for an expression, and epilogue={given!r} has its own")
    return given
