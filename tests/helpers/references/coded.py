"""The right results of calls whose elements travel as codes of 8 bits."""

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
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        blocks.reshape(-1)[: values.size] = values
    largest = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    finite = np.isfinite(largest)
    largest[~finite] = 0
    exponents = np.maximum(-126, np.frexp(largest)[1] - 12)
    while (too_large := largest > LARGEST[codes] * 2.0**exponents).any():
        exponents += too_large
    scaled = np.where(finite, blocks, 0) / 2.0**exponents
    if codes == "int8":
        coded = np.rint(scaled) + 0.0  # codes of integers have one zero
    else:
        import ml_dtypes

        coded = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    decoded = np.where(finite, coded * 2.0**exponents, np.nan).astype(np.float32)
    return decoded.reshape(-1)[: values.size]


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
