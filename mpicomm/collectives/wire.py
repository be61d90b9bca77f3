"""The argument ``wire_dtype`` of a collective, and floats as codes of 8 bits by NumPy: the host's eight_bits.cuh.

Each block of 128 elements has a scale: a power of two, the least with which no element of the block exceeds the largest
code. Codes are rounded to nearest, ties to even. The scale of a block with a NaN or an infinity is NaN, and so are all
elements that its codes stand for. A scale is a byte, the exponent of a float32, and 255 for NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.epilogues.scaled_codes import NOT_FINITE, powers_for
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand

CODES = ("float8_e4m3fn", "int8")
"""The types of codes."""
ERRORS = {"float8_e4m3fn": 1 / 16, "int8": 1 / 127}
"""The most by which a code differs from its element, as a part of the largest magnitude in the block."""
CODED = ("float32", "float16", "bfloat16")
"""The types of elements that travel as codes."""
CODED_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Wire:
    """Elements travel as codes of type ``codes``. In an all-reduce results do so, too, if ``again``."""

    codes: str
    again: bool = True

    def __str__(self) -> str:
        return self.codes if self.again else f"{self.codes}, None"

    @property
    def error(self) -> float:
        """The most by which the sum of an all-reduce differs, as a part of the largest magnitudes in its block."""
        one = ERRORS[self.codes]
        return one * (2 + one) if self.again else one

    def require(
        self,
        operation: str,
        dtype: np.dtype[Any] | None,
        op: str | None,
        operands: Sequence[Operand] = (),
        *,
        plain: bool = True,
    ) -> None:
        """Raise `InvalidUsageError` for a call that no codes can carry, also for a call that is not ``plain``."""
        if dtype is None or dtype.name not in CODED:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for elements of {", ".join(CODED)}, and these are '
                f"{'elements that only MPI knows' if dtype is None else dtype}: leave it out, or convert the array"
            )
        if op is not None and op not in CODED_OPS:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for SUM and AVG, and op is {op}: leave it out'
            )
        if not plain or len({operand.dtype for operand in operands if operand.total}) > 1:
            kinds = " and ".join(str(operand.dtype) for operand in operands)
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for two buffers of one element type, and goes with no derived '
                f"datatype and no epilogue; the buffers have {kinds}: convert one, or leave it out"
            )


_KNOWN: dict[Any, Wire | None] = {None: None, **{codes: Wire(codes) for codes in CODES}}


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
    if len(names) == 2 and names[0] in CODES and names[1] in (names[0], None):
        return Wire(names[0], again=names[1] is not None)
    raise InvalidUsageError(
        f'wire_dtype={given!r}: pass "float8_e4m3fn" or "int8", a pair such as ("int8", None) for results that travel '
        "as they are, or leave it out"
    )


BLOCK = 128
_AT_ONCE = 512  # the blocks that NumPy computes at once, so that they stay in the cache
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
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            rows = slice(start, min(start + _AT_ONCE, blocks))
            part = np.zeros((rows.stop - start, BLOCK), np.float32)
            given = values[start * BLOCK : rows.stop * BLOCK]
            part.reshape(-1)[: given.size] = given
            scale = powers_for((part.view(np.uint32) & _MAGNITUDE).max(axis=1), _LARGEST[codes])
            scales[rows] = scale
            part *= ((np.uint32(254) - np.minimum(scale, 253)) << np.uint32(23)).view(np.float32)[:, None]
            part[scale == NOT_FINITE] = 0
            if codes == "float8_e4m3fn":
                coded[rows] = _encoded_float8(part)
            else:
                coded[rows] = np.rint(part).astype(np.int8).view(np.uint8) ^ _FLIPPED


def decode(coded: npt.NDArray[np.uint8], codes: str, out: npt.NDArray[np.float32], *, adds: bool = False) -> None:
    """Write the values of codes into ``out``, or add them to it; ``coded`` is the result of `encode`."""
    blocks = blocks_of(out.size)
    table, scales = _TABLES[codes], coded[blocks * BLOCK :]
    with np.errstate(all="ignore"):
        for start in range(0, blocks, _AT_ONCE):
            stop = min(start + _AT_ONCE, blocks)
            values = table[coded[start * BLOCK : stop * BLOCK]].reshape(-1, BLOCK) * _SCALES[scales[start:stop], None]
            part = out[start * BLOCK : stop * BLOCK]
            values = values.reshape(-1)[: part.size]
            part[:] = part + values if adds else values


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


_CODE = np.arange(256, dtype=np.uint32)
_FLOAT8 = ((_CODE & np.uint32(0x7F)) << np.uint32(20)).view(np.float32) * np.float32(2.0**120)
_TABLES = {
    "float8_e4m3fn": np.copysign(_FLOAT8, np.where(_CODE < 128, 1, -1)).astype(np.float32),
    "int8": (_CODE.astype(np.uint8) ^ _FLIPPED).view(np.int8).astype(np.float32),
}
"""The value of each code."""
_SCALES = (_CODE << np.uint32(23)).view(np.float32).copy()
"""The factor of each scale."""
_SCALES[NOT_FINITE] = np.nan
