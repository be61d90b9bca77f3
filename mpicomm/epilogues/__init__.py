"""Epilogues: functions that an all-reduce applies to its result before it stores the result.

``comm.Allreduce(x, y, epilogue=mpicomm.epilogues.rms_norm(residual, weight))``. ``epilogue`` also takes an expression.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpicomm.epilogues.base import Epilogue

if TYPE_CHECKING:
    from mpicomm.epilogues.elementwise import Elementwise
    from mpicomm.epilogues.norm import ScaleLayout
else:  # few programs have epilogues, so their modules load at first use

    def __getattr__(name: str) -> object:
        if name != "Elementwise":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from mpicomm.epilogues.elementwise import Elementwise

        return Elementwise


__all__ = ["Elementwise", "Epilogue", "fp8", "layer_norm", "rms_norm"]


def fp8(scale: Any, dtype: str = "float8_e4m3fn") -> Epilogue:
    """Return the epilogue that multiplies by ``scale`` and converts to fp8, with saturation. Local.

    NaN stays NaN. ``scale`` is a number, or an array of one element on the device of the result. The array may change
    between replays of a CUDA graph. ``recvbuf`` has elements of ``dtype``: "float8_e4m3fn" or "float8_e5m2". A call
    with another ``recvbuf`` raises `InvalidUsageError`.
    """
    from mpicomm.epilogues.elementwise import ToFp8

    return ToFp8(scale, dtype)


def rms_norm(
    residual: Any,
    weight: Any,
    eps: float = 1e-6,
    *,
    linear_bias: Any = None,
    scales: Any = None,
    scale: Any = None,
    scale_layout: ScaleLayout = "linear",
) -> Epilogue:
    """Return the epilogue that adds ``residual`` to the result and normalises its rows, as layers of a model do. Local.

    The elements are floats, and a row has as many elements as ``weight``. h = result + linear_bias + residual; residual
    becomes h; recvbuf becomes h / sqrt(mean of h * h over the row + eps) * weight. ``linear_bias``, a row of the type
    of ``sendbuf``, is the bias of the product whose parts the call adds. The computation is in float32, or in float64
    for float64. h is rounded to the type of ``sendbuf``, and residual also has this type. All ranks pass equal arrays,
    because one rank may compute h for all. The arrays share no memory, and the call's ``sendbuf`` shares none with
    residual and scales.

    With ``scale`` or ``scales`` the row is quantized, with saturation. ``recvbuf`` has float8_e4m3fn or float8_e5m2,
    or uint8 with two float4_e2m1fn in each byte, the first in the lower half. These need ``scales``. ``scale``, a
    number or one element of float32, multiplies the row first. Each group of a row has an element of ``scales``. A
    group is the row, or 16, 32, 64 or 128 elements. The number of scales says which. A scale is the largest magnitude
    of its group, after ``scale``, divided by the largest value of the quantized type. The elements of the group are
    divided by it. The type of scales is one of these:

    - float32, rounded to nearest;
    - uint8 for float8_e8m0fnu, rounded up to a power of two: MXFP8 for groups of 32 elements of fp8;
    - float8_e4m3fn, rounded to nearest: NVFP4 for groups of 16 elements. ``scale`` is the global scale then.

    ``scale_layout`` is "linear", [rows, groups of a row], or for the last two "128x4", the tiles of cuBLAS, padded
    to multiples of 128 rows and 4 groups. The padding stays as it is. The scale of a group with NaN or infinity is NaN.

    In "one_shot" and "two_shot" on GPUs the kernel that reduces computes it, for rows of whole 16 bytes. "one_shot"
    needs rows of up to 32 KiB, or a row for each block of the kernel. "two_shot" needs a row of each rank for each
    block of the kernel. In other calls on GPUs one more kernel follows and computes it, with the same bits.
    """
    from mpicomm.epilogues.norm import Norm

    return Norm("rms_norm", (residual, weight, None, linear_bias, scales, scale), eps, scale_layout)


def layer_norm(
    residual: Any,
    weight: Any,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    linear_bias: Any = None,
    scales: Any = None,
    scale: Any = None,
    scale_layout: ScaleLayout = "linear",
) -> Epilogue:
    """Return the epilogue that adds ``residual`` to the result and applies a layer norm to its rows. Local.

    As `rms_norm`, but recvbuf becomes (h - mean) / sqrt(mean of (h - mean)^2 + eps) * weight + bias. ``bias`` is a row
    of the type of weight, or None.
    """
    from mpicomm.epilogues.norm import Norm

    return Norm("layer_norm", (residual, weight, bias, linear_bias, scales, scale), eps, scale_layout)


def as_epilogue(given: Any, operands: dict[str, Any]) -> Epilogue | None:
    """Return the epilogue of a call from its argument ``epilogue`` and its other keywords; None without both."""
    if given is None and not operands:
        return None
    if given is None:
        raise TypeError(f"{', '.join(operands)}: no argument of the call has this name, and there is no epilogue=")
    if isinstance(given, str):
        from mpicomm.epilogues.elementwise import Elementwise

        return Elementwise(given, **operands)
    if not isinstance(given, Epilogue):
        raise TypeError(f"epilogue={given!r} is no epilogue: pass an expression, or one of mpicomm.epilogues")
    if operands:
        raise TypeError(f"{', '.join(operands)}: operands are for an expression, and epilogue={given!r} has its own")
    return given
