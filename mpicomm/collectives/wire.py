"""The argument ``wire_dtype`` of a collective, and quantization by NumPy: the host's copy of wire_quantization.cuh.

Each block of 128 elements has a scale: a power of two, the least with which no element of the block exceeds the largest
quantized value. Values are rounded to nearest, ties to even. The scale of a block with a NaN or an infinity is NaN, and
all its elements dequantize to NaN. A scale is a byte, the exponent of a float32, and 255 for NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.epilogues.block_scaled import NOT_FINITE, powers_for
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand

WIRE_DTYPES = ("float8_e4m3fn", "int8")
"""The types as which elements travel."""
ERRORS = {"float8_e4m3fn": 1 / 16, "int8": 1 / 127}
"""The most by which quantization changes an element, as a part of the largest magnitude in the block."""
QUANTIZABLE = ("float32", "float16", "bfloat16")
"""The types of elements that can travel quantized."""
QUANTIZABLE_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Wire:
    """Elements travel quantized as ``dtype``. In an all-reduce results do, too, if ``quantizes_result``."""

    dtype: str
    quantizes_result: bool = True

    def __str__(self) -> str:
        return self.dtype if self.quantizes_result else f"{self.dtype}, None"

    @property
    def error(self) -> float:
        """The most by which the sum of an all-reduce differs, as a part of the largest magnitudes in its block."""
        one = ERRORS[self.dtype]
        return one * (2 + one) if self.quantizes_result else one

    def require(
        self,
        operation: str,
        dtype: np.dtype[Any] | None,
        op: str | None,
        operands: Sequence[Operand] = (),
        *,
        plain: bool = True,
    ) -> None:
        """Raise `InvalidUsageError` for a call that cannot be quantized, also for a call that is not ``plain``."""
        if dtype is None or dtype.name not in QUANTIZABLE:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for elements of {", ".join(QUANTIZABLE)}, and these are '
                f"{'elements that only MPI knows' if dtype is None else dtype}: leave it out, or convert the array"
            )
        if op is not None and op not in QUANTIZABLE_OPS:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for SUM and AVG, and op is {op}: leave it out'
            )
        if not plain or len({operand.dtype for operand in operands if operand.total}) > 1:
            kinds = " and ".join(str(operand.dtype) for operand in operands)
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for two buffers of one element type, and goes with no derived '
                f"datatype and no epilogue; the buffers have {kinds}: convert one, or leave it out"
            )


_KNOWN: dict[Any, Wire | None] = {None: None, **{dtype: Wire(dtype) for dtype in WIRE_DTYPES}}


def as_wire(given: Any) -> Wire | None:
    """Return the argument ``wire_dtype``; None without. Raises `InvalidUsageError`."""
    try:
        return _KNOWN[given]
    except (KeyError, TypeError):
        pass
    names = list(given) if isinstance(given, tuple) else [given, given]
    for place, name in enumerate(names):
        if name is not None and not isinstance(name, str):
            with suppress(TypeError):
                names[place] = np.dtype(name).name
    if len(names) == 2 and names[0] in WIRE_DTYPES and names[1] in (names[0], None):
        return Wire(names[0], quantizes_result=names[1] is not None)
    raise InvalidUsageError(
        f'wire_dtype={given!r}: pass "float8_e4m3fn" or "int8", a pair such as ("int8", None) for results that travel '
        "as they are, or leave it out"
    )


BLOCK = 128
_AT_ONCE = 512  # the blocks that NumPy computes at once, so that they stay in the cache
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = {"float8_e4m3fn": np.float32(448), "int8": np.float32(127)}
_FLIPPED = np.uint8(0x7F)  # no int8 becomes 0xFF: see wire_quantization.cuh

Array = npt.NDArray[Any]


def blocks_of(count: int) -> int:
    """Return the number of blocks of ``count`` elements."""
    return -(-count // BLOCK)


def quantized_nbytes(count: int) -> int:
    """Return the bytes of ``count`` elements on the wire of the host: quantized whole blocks, and their scales."""
    return blocks_of(count) * (BLOCK + 1)


def quantize(values: Array, dtype: str, out: npt.NDArray[np.uint8]) -> None:
    """Write ``values`` quantized into ``out``, of `quantized_nbytes` bytes: all blocks, then their scales."""
    blocks = blocks_of(values.size)
    quantized, scales = out[: blocks * BLOCK].reshape(blocks, BLOCK), out[blocks * BLOCK :]
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, blocks))
            part = np.zeros((rows.stop - start, BLOCK), np.float32)
            given = values[start * BLOCK : rows.stop * BLOCK]
            part.reshape(-1)[: given.size] = given
            scale = powers_for((part.view(np.uint32) & _MAGNITUDE).max(axis=1), _LARGEST[dtype])
            scales[rows] = scale
            part *= ((np.uint32(254) - np.minimum(scale, 253)) << np.uint32(23)).view(np.float32)[:, None]
            part[scale == NOT_FINITE] = 0
            if dtype == "float8_e4m3fn":
                quantized[rows] = _as_float8(part)
            else:
                quantized[rows] = np.rint(part).astype(np.int8).view(np.uint8) ^ _FLIPPED


def dequantize(
    quantized: npt.NDArray[np.uint8], dtype: str, out: npt.NDArray[np.float32], *, adds: bool = False
) -> None:
    """Write the values of ``quantized``, a result of `quantize`, into ``out``, or add them to it."""
    blocks = blocks_of(out.size)
    table, scales = _TABLES[dtype], quantized[blocks * BLOCK :]
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            stop = min(start + _AT_ONCE, blocks)
            values = (
                table[quantized[start * BLOCK : stop * BLOCK]].reshape(-1, BLOCK) * _SCALES[scales[start:stop], None]
            )
            part = out[start * BLOCK : stop * BLOCK]
            values = values.reshape(-1)[: part.size]
            part[:] = part + values if adds else values


def _as_float8(part: npt.NDArray[np.float32]) -> Array:
    bits = part.view(np.uint32)
    magnitudes, signs = bits & _MAGNITUDE, bits >> np.uint32(31) << np.uint32(7)
    odd = magnitudes >> np.uint32(20) & np.uint32(1)
    normal = (magnitudes - np.uint32(120 << 23) + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    # In the sum with this power of two, the lowest bit stands for the smallest subnormal fp8.
    power = np.uint32(141 << 23)
    subnormal = (magnitudes.view(np.float32) + power.view(np.float32)).view(np.uint32) - power
    rounded = np.where(magnitudes < np.uint32(121 << 23), subnormal, normal)
    quantized: Array = (rounded | signs).astype(np.uint8)
    return quantized


_BYTES = np.arange(256, dtype=np.uint32)
_FLOAT8 = ((_BYTES & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * np.float32(2.0**120)
_TABLES = {
    "float8_e4m3fn": np.copysign(_FLOAT8, np.where(_BYTES < 128, 1, -1)).astype(np.float32),
    "int8": (_BYTES.astype(np.uint8) ^ _FLIPPED).view(np.int8).astype(np.float32),
}
"""The value of each quantized byte."""
_SCALES = (_BYTES << np.uint32(23)).view(np.float32).copy()
"""The factor of each scale."""
_SCALES[NOT_FINITE] = np.nan
