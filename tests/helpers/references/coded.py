"""The right results of calls whose elements travel as codes of 8 bits, one block at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
BLOCK = 128
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
ERROR = {"float8_e4m3fn": 1 / 16, "int8": 1 / 127}  # as the docstring of Allreduce says


def through_codes(values: Array, codes: str) -> npt.NDArray[np.float32]:
    """Return the values for which the codes of ``values`` stand."""
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
    blocks = [_through(wide[start : start + BLOCK], codes) for start in range(0, wide.size, BLOCK)]
    return np.concatenate([np.empty(0, np.float32), *blocks])


def _through(block: npt.NDArray[np.float32], codes: str) -> npt.NDArray[np.float32]:
    largest = float(np.max(np.abs(block)))
    if not np.isfinite(largest):
        return np.full_like(block, np.nan)
    exponent = max(-126, int(np.frexp(largest)[1]) - 12)
    while largest > LARGEST[codes] * 2.0**exponent:
        exponent += 1
    scaled = block.astype(np.float64) / 2.0**exponent
    if codes == "int8":
        coded = np.rint(scaled) + 0.0  # codes of integers have one zero
    else:
        import ml_dtypes

        coded = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    return (coded * 2.0**exponent).astype(np.float32)


def coded_sum(parts: Sequence[Array], codes: str, op: str = "sum", *, again: bool = True) -> Array:
    """Return the reduction of ``parts``, which travel as codes; with ``again`` the result does so, too."""
    total = through_codes(parts[0], codes)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + through_codes(part, codes)
        if op == "avg":
            total = total / np.float32(len(parts))
        if again:
            total = through_codes(total, codes)
        return total.astype(parts[0].dtype)


def bound(parts: Sequence[Array], codes: str, *, again: bool = True) -> npt.NDArray[np.float64]:
    """Return the most by which each element of `coded_sum` may differ from the exact sum, as the docstring says."""
    error, count = ERROR[codes], parts[0].size
    rows = -(-count // BLOCK)
    largest = np.zeros(rows)
    for part in parts:
        padded = np.zeros(rows * BLOCK)
        padded[:count] = np.abs(part.astype(np.float64))
        largest += padded.reshape(rows, BLOCK).max(axis=1)
    coded = error * (2 + error) if again else error
    limit = np.repeat(largest * coded, BLOCK)[:count]
    # The sum in float32, the elements' type, and the least scale.
    rounding = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[parts[0].dtype.name]
    least = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}[parts[0].dtype.name]
    return limit + np.repeat(largest, BLOCK)[:count] * rounding * len(parts) + least * (len(parts) + 1)
