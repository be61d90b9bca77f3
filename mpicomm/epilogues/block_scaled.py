"""Block-scaled rows by NumPy, as fp8 or fp4 with a scale for each group: the host's copy of block_scaled.cuh.

The scale of a group is its largest magnitude divided by the largest quantized value, rounded to the type of the scales.
A quantized value is the value times the inverse of the scale, rounded to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mpicomm.mpi.types import covered_dtype

Array = npt.NDArray[Any]

LARGEST = {"float8_e4m3fn": np.float32(448), "float8_e5m2": np.float32(57344), "float4_e2m1fn": np.float32(6)}
"""The largest value of each quantized type."""
NOT_FINITE = 255
"""The power of two, as its exponent in a float32, of a group with a NaN or an infinity: a NaN."""
GROUPS = (16, 32, 64, 128)
"""The elements of groups within a row."""
TILED_GROUPS = {"float8_e8m0fnu": (32,), "float8_e4m3fn": (16,)}
"""The elements of groups whose scales of a type lie in tiles."""
SCALES = {"float32": "float32", "uint8": "float8_e8m0fnu", "float8_e4m3fn": "float8_e4m3fn"}
"""The types of arrays of scales, and the types of their elements."""
TILE_ROWS, TILE_COLUMNS = 128, 4

_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LEAST = np.finfo(np.float32).tiny
_BOUNDS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], np.float32)  # between the magnitudes of float4_e2m1fn


class QuantizedFormat(NamedTuple):
    """The types of quantized rows and of their scales. ``group`` elements share a scale; 0 means all of a row.

    Without ``scales`` there are only quantized values. ``tiled`` is whether the scales lie in tiles.
    """

    type: str
    scales: str | None = None
    group: int = 0
    tiled: bool = False

    @property
    def per_byte(self) -> int:
        """The quantized values in a byte."""
        return 2 if self.type == "float4_e2m1fn" else 1

    def __str__(self) -> str:
        if self.scales is None:
            return self.type
        where = f"each {self.group}" if self.group else "each row"
        return f"{self.type} with {self.scales} for {where}{' in tiles' if self.tiled else ''}"


def scales_of(rows: int, columns: int, *, tiled: bool) -> int:
    """Return the number of scales of ``rows`` rows with ``columns`` scales each. Tiles are whole."""
    if not tiled:
        return rows * columns
    return -(-rows // TILE_ROWS) * TILE_ROWS * tiles_of(columns) * TILE_COLUMNS


def tiles_of(columns: int) -> int:
    """Return the tiles side by side of rows with ``columns`` scales each."""
    return -(-columns // TILE_COLUMNS)


def quantize(
    to: QuantizedFormat, values: npt.NDArray[np.float32], first: int, out: Array, scales: Array | None
) -> None:
    """Write quantized rows into the rows of ``out``, and their scales to their places in all ``scales``.

    ``first`` is the number of the first row. ``out`` has bytes, and ``scales`` has elements of the type of its array.
    """
    rows, hidden = values.shape
    if to.scales is not None and scales is not None:
        groups = values.reshape(rows, -1, to.group or hidden)
        peaks = (np.ascontiguousarray(groups).view(np.uint32) & _MAGNITUDE).max(axis=2)
        stored, factors = _scales_for(peaks, to)
        scales[_places(first, rows, groups.shape[1], tiled=to.tiled)] = stored
        inverse = np.where(factors == 0, np.float32(0), np.float32(1) / factors)
        values = (groups * inverse[:, :, None]).reshape(rows, hidden)
    largest = LARGEST[to.type]
    saturated = np.clip(values, -largest, largest)
    if to.per_byte == 1:
        out[:] = saturated.astype(covered_dtype(to.type)).view(np.uint8)
    else:
        four = _as_float4(saturated)
        out[:] = four[:, 0::2] | four[:, 1::2] << np.uint8(4)


def powers_for(peaks: npt.NDArray[np.uint32], largest: np.float32) -> npt.NDArray[np.uint32]:
    """Return the least powers of two by which the largest magnitudes, as bits, are no larger than ``largest``."""
    bits = int(largest.view(np.uint32))
    # A larger mantissa than the mantissa of the largest quantized value carries into the exponent.
    carried = (peaks.astype(np.int64) + (0x7FFFFF - (bits & 0x7FFFFF))) >> 23
    powers = np.maximum(carried - ((bits >> 23) - 127), 1)
    return np.where(peaks < _INFINITY, powers, NOT_FINITE).astype(np.uint32)


def _scales_for(peaks: npt.NDArray[np.uint32], to: QuantizedFormat) -> tuple[Array, npt.NDArray[np.float32]]:
    """Return the scales for the bits of the largest magnitudes, as they are stored and as floats."""
    finite, largest = peaks < _INFINITY, LARGEST[to.type]
    if to.scales == "float8_e8m0fnu":
        exponents = powers_for(peaks, largest)
        powers = (exponents << np.uint32(23)).view(np.float32)
        return exponents.astype(np.uint8), np.where(finite, powers, np.float32(np.nan))
    quotients = np.where(finite, peaks.view(np.float32) / largest, np.float32(np.nan))
    if to.scales == "float32":
        scales = np.where(quotients < _LEAST, _LEAST, quotients)  # so the inverse is finite
        return scales, scales
    rounded = np.where(quotients > 448, np.float32(448), quotients).astype(covered_dtype("float8_e4m3fn"))
    return rounded, rounded.astype(np.float32)


def _places(first: int, rows: int, columns: int, *, tiled: bool) -> npt.NDArray[np.int64]:
    """Return the index of the scale of each group of each row."""
    row = np.arange(first, first + rows, dtype=np.int64)[:, None]
    column = np.arange(columns, dtype=np.int64)
    if not tiled:
        return row * columns + column
    places: npt.NDArray[np.int64] = (row // 128 * tiles_of(columns) + column // 4) * 512
    return places + row % 32 * 16 + row % 128 // 32 * 4 + column % 4


def _as_float4(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    magnitudes, number = np.abs(values), np.zeros(values.shape, np.uint8)
    for below, bound in enumerate(_BOUNDS):  # a magnitude with an even number takes both of its bounds
        number += magnitudes >= bound if below % 2 else magnitudes > bound
    number |= np.signbit(values).astype(np.uint8) << np.uint8(3)
    return number
