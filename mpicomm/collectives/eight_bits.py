"""Floats as codes of 8 bits with a scale for each block of 128 elements, by NumPy: the host's copy of eight_bits.cuh.

The scale of a block is a power of two, the least with which no element of the block exceeds the largest code. Codes are
rounded to nearest, ties to even. The scale of a block with a NaN or an infinity is NaN, and so are all elements that
its codes stand for. A scale is a byte, the exponent of a float32, and 255 for NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK = 128
NOT_FINITE = 255
_AT_ONCE = 512  # the blocks that NumPy computes at once, so that they stay in the cache
_INFINITY = np.uint32(0x7F800000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LARGEST = {"float8_e4m3fn": np.float32(448), "int8": np.float32(127)}
_FLIPPED = np.uint8(0x7F)  # no code of int8 becomes 0xFF: see eight_bits.cuh

Array = npt.NDArray[Any]


def blocks_of(count: int) -> int:
    """Return the number of blocks of ``count`` elements."""
    return -(-count // BLOCK)


def coded_nbytes(count: int) -> int:
    """Return the bytes of ``count`` elements on the wire of the host: the codes of whole blocks, and their scales."""
    return blocks_of(count) * (BLOCK + 1)


def encode(values: Array, codes: str, out: npt.NDArray[np.uint8]) -> None:
    """Write the codes of ``values`` into ``out``, of `coded_nbytes` bytes: the codes, then the scales."""
    blocks = blocks_of(values.size)
    coded, scales = out[: blocks * BLOCK].reshape(blocks, BLOCK), out[blocks * BLOCK :]
    encoded = _encoded_float8 if codes == "float8_e4m3fn" else _encoded_int8
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, blocks))
            part = np.zeros((rows.stop - start, BLOCK), np.float32)
            given = values[start * BLOCK : rows.stop * BLOCK]
            part.reshape(-1)[: given.size] = given
            scale = _scales_for(part, codes)
            scales[rows] = scale
            part *= ((np.uint32(254) - np.minimum(scale, 253)) << np.uint32(23)).view(np.float32)[:, None]
            part[scale == NOT_FINITE] = 0
            coded[rows] = encoded(part)


def decode(coded: npt.NDArray[np.uint8], codes: str, out: Array) -> None:
    """Write the values of codes into ``out``; ``coded`` is the result of `encode`."""
    _each_decoded(coded, codes, out.size, lambda part, values: np.copyto(out[part], values, casting="unsafe"))


def add(coded: npt.NDArray[np.uint8], codes: str, total: npt.NDArray[np.float32]) -> None:
    """Add the values of codes to ``total``."""
    _each_decoded(coded, codes, total.size, lambda part, values: np.add(total[part], values, out=total[part]))


def _each_decoded(coded: npt.NDArray[np.uint8], codes: str, count: int, take: Any) -> None:
    blocks = blocks_of(count)
    table, scales = _TABLES[codes], coded[blocks * BLOCK :]
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            stop = min(start + _AT_ONCE, blocks)
            values = table[coded[start * BLOCK : stop * BLOCK]].reshape(-1, BLOCK) * _SCALES[scales[start:stop], None]
            part = slice(start * BLOCK, min(stop * BLOCK, count))
            take(part, values.reshape(-1)[: part.stop - part.start])


def _scales_for(part: npt.NDArray[np.float32], codes: str) -> Array:
    """Return the scale of each row."""
    magnitudes = (part.view(np.uint32) & _MAGNITUDE).max(axis=1)
    largest = int(_LARGEST[codes].view(np.uint32))
    exponent, mantissa = (largest >> 23) - 127, largest & 0x7FFFFF
    # A larger mantissa than the mantissa of the largest code carries into the exponent.
    carried = (magnitudes + np.uint32(0x7FFFFF - mantissa)) >> np.uint32(23)
    scales = np.maximum(carried, exponent + 1) - np.uint32(exponent)
    found: Array = np.where(magnitudes >= _INFINITY, np.uint32(NOT_FINITE), scales).astype(np.uint32)
    return found


def _encoded_int8(part: npt.NDArray[np.float32]) -> Array:
    flipped: Array = np.rint(part).astype(np.int8).view(np.uint8) ^ _FLIPPED
    return flipped


def _encoded_float8(part: npt.NDArray[np.float32]) -> Array:
    bits = part.view(np.uint32)
    magnitudes, signs = bits & _MAGNITUDE, bits >> np.uint32(31) << np.uint32(7)
    odd = magnitudes >> np.uint32(20) & np.uint32(1)
    normal = (magnitudes - np.uint32(120 << 23) + np.uint32(0x7FFFF) + odd) >> np.uint32(20)
    # In the sum with this power of two, the lowest bit stands for the smallest subnormal code.
    power = np.uint32(141 << 23)
    subnormal = (magnitudes.view(np.float32) + power.view(np.float32)).view(np.uint32) - power
    rounded = np.where(magnitudes < np.uint32(121 << 23), subnormal, normal)
    coded: Array = (rounded | signs).astype(np.uint8)
    return coded


def _decoded_float8() -> Array:
    """Return the value of each code."""
    code = np.arange(256, dtype=np.uint32)
    values = ((code & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * np.float32(2.0**120)
    signed: Array = np.copysign(values, np.where(code < 128, 1, -1)).astype(np.float32)
    return signed


def _factors() -> Array:
    """Return the factor of each scale."""
    factors: Array = (np.arange(256, dtype=np.uint32) << np.uint32(23)).view(np.float32).copy()
    factors[NOT_FINITE] = np.nan
    return factors


_TABLES = {
    "float8_e4m3fn": _decoded_float8(),
    "int8": (np.arange(256, dtype=np.uint8) ^ _FLIPPED).view(np.int8).astype(np.float32),
}
_SCALES = _factors()
