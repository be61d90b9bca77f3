"""The right results of reductions by NumPy, also of elements that travel quantized, and arrays worth reducing."""

from __future__ import annotations

import bisect
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mpicomm.collectives.patterns import split
from mpicomm.mpi.arguments import Span

Array = npt.NDArray[Any]

SENTINELS = (0xFFF5A3C6, 0x7FF5A3C6)
"""Words that mean that a packet has not come, or that stand for other words. In data they are the hard case."""

NARROW = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")

_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "sum": np.add,
    "avg": np.add,
    "tree": np.add,
    "prod": np.multiply,
    # Written out, because NumPy does not document which of +0.0 and -0.0 it returns.
    "max": lambda a, b: np.where((a > b) | (a != a), a, b),
    "min": lambda a, b: np.where((a < b) | (a != a), a, b),
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "land": np.logical_and,
    "lor": np.logical_or,
    "lxor": np.logical_xor,
    # Operations of the user, by their expressions; the first of them neither commutes nor associates.
    "a * 2 - b": lambda a, b: a * a.dtype.type(2) - b,
    "a and (not b)": lambda a, b: a & ~b,
}
OWN = tuple(op for op in _BINARY if " " in op)


def dtype_named(name: str) -> np.dtype[Any]:
    """Return the dtype of NumPy or of ml_dtypes; raises ImportError if ml_dtypes is needed and missing."""
    if name in NARROW and name != "float16":
        name = getattr(importlib.import_module("ml_dtypes"), name)
    dtype: np.dtype[Any] = np.dtype(name)
    return dtype


def dtype_or_skip(name: str, xp: Any = np) -> np.dtype[Any]:
    """Return the dtype, or skip the test if there is no ml_dtypes, or ``xp`` has no arrays of the dtype."""
    try:
        dtype = dtype_named(name)
        xp.empty(1, dtype)
    except (ImportError, TypeError, ValueError) as error:
        pytest.skip(f"no arrays of {name}: {error}")
    return dtype


def rounded_once(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return finite numbers as narrow floats: the nearest ones, of two the one with an even last bit."""
    bits = np.arange(1 << (8 * dtype.itemsize - 1)).astype(f"u{dtype.itemsize}")
    with np.errstate(all="ignore"):
        floats = bits.view(dtype).astype(np.float64)
    finite = floats[np.isfinite(floats)].tolist()  # NaN and infinity have the bits above
    finite.append(2 * finite[-1] - finite[-2])
    found = []
    for value in values.tolist():  # Python compares integers and floats exactly
        above = bisect.bisect_left(finite, abs(value), hi=len(finite) - 1)
        middle = (finite[above - 1] + finite[above]) / 2 if above else 0.0
        down = above > 0 and (abs(value) < middle or (abs(value) == middle and above % 2 == 1))
        found.append(above - down | (math.copysign(1, value) < 0) << (8 * dtype.itemsize - 1))
    return np.array(found, bits.dtype).view(dtype)


Groups = Sequence[Sequence[int]]


def reduced(op: str, parts: Sequence[Array], groups: Groups | None = None) -> Array:
    """Return ((part 0 op part 1) op part 2) ..., narrow floats in float32; or the sum of a binary tree.

    With ``groups`` of indices each group is reduced so, and then their results.
    """
    dtype = parts[0].dtype
    wide = [part.astype(np.float32) for part in parts] if dtype.name in NARROW else list(parts)
    with np.errstate(all="ignore"):
        if groups is not None:
            result = _folded(op, [_folded(op, [wide[index] for index in group]) for group in groups])
        else:
            result = _folded(op, wide)
        if op == "avg":
            result = np.divide(result, np.asarray(len(parts), result.dtype))
        return result.astype(dtype)


def _folded(op: str, parts: Sequence[Array]) -> Array:
    if op == "tree" and len(parts) > 1:
        half = 1 << (len(parts) - 1).bit_length() - 1
        return np.add(_folded(op, parts[:half]), _folded(op, parts[half:]))
    result = parts[0]
    for part in parts[1:]:
        if part.dtype.kind == "c" and op == "prod":
            # NumPy fuses products and sums if the processor can.
            real = result.real * part.real - result.imag * part.imag
            imag = result.real * part.imag + result.imag * part.real
            result = np.empty_like(result)
            result.real, result.imag = real, imag
        else:
            result = _BINARY[op](result, part)
    return result


def ring_reduced(op: str, parts: Sequence[Array]) -> Array:
    """Return for shard r ((part r + 1 op part r + 2) op ...) op part r, rounded to the dtype at every step."""
    size, whole = len(parts), parts[0]
    stops = np.cumsum([shard.count for shard in split(Span(0, whole.size), size, whole.itemsize)])
    shards = [np.split(part, stops[:-1]) for part in parts]
    orders = [[(index + step) % size for step in range(1, size + 1)] for index in range(size)]
    return np.concatenate(
        [
            functools.reduce(lambda a, b: reduced(op, [a, b]), [shards[rank][index] for rank in order])
            for index, order in enumerate(orders)
        ]
    )


def samples(dtype: np.dtype[Any], count: int, rng: np.random.Generator) -> Array:
    """Return random values. Many floats are special: NaN, infinities, zeros, subnormal and large numbers."""
    if dtype.kind == "b":
        return rng.integers(0, 2, count).astype(np.bool_)
    if dtype.kind in "iu":
        integers: Array = np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).copy()
        integers[rng.random(count) < 0.2] = 0
        return with_sentinels(integers, rng)
    part = np.dtype(f"f{dtype.itemsize // 2}") if dtype.kind == "c" else dtype
    size = count * (dtype.itemsize // part.itemsize)
    values = rng.standard_normal(size).astype(part)
    wild = rng.random(size)
    any_bits = np.frombuffer(rng.bytes(size * part.itemsize), part)
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, 2.0**-14], np.float64)
    with np.errstate(all="ignore"):
        chosen = rng.choice(special, size).astype(part)
    result: Array = np.where(wild < 0.15, any_bits, np.where(wild < 0.25, chosen, values)).view(dtype)
    return with_sentinels(result, rng)


def with_sentinels(array: Array, rng: np.random.Generator) -> Array:
    """Return the array with some of its words of 32 bits replaced by `SENTINELS`."""
    words = array.view(np.uint8)[: array.nbytes // 4 * 4].view(np.uint32)
    where = rng.random(words.size) < 0.02
    words[where] = rng.choice(SENTINELS, int(where.sum())).astype(np.uint32)
    return array


def require_same(actual: Array, expected: Array) -> None:
    """Assert that two arrays have the same bits, or both NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    if actual.dtype.kind == "c":
        part = np.dtype(f"f{actual.dtype.itemsize // 2}")
        actual, expected = actual.view(part), expected.view(part)
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    differ = actual.view(bits) != expected.view(bits)
    with np.errstate(all="ignore"):
        differ &= ~((actual != actual) & (expected != expected))
    where = np.flatnonzero(differ)
    assert where.size == 0, (
        f"{where.size} of {differ.size} differ, first at {where[0]}: "
        f"{actual[where[0]]!r} instead of {expected[where[0]]!r}"
    )


BLOCK = 128
"""Elements that share a scale if elements travel quantized."""
LARGEST = {"float8_e4m3fn": 448.0, "int8": 127.0}
ERROR = {"float8_e4m3fn": 1 / 16, "int8": 1 / 127}  # as the docstring of Allreduce says


def round_trip(values: Array, wire: str) -> npt.NDArray[np.float32]:
    """Return ``values``, quantized and dequantized."""
    blocks = np.zeros((-(-values.size // BLOCK), BLOCK), np.float32)
    with np.errstate(all="ignore"):
        blocks.reshape(-1)[: values.size] = values
    largest = np.abs(blocks).max(axis=1, keepdims=True).astype(np.float64)
    finite = np.isfinite(largest)
    largest[~finite] = 0
    exponents = np.maximum(-126, np.frexp(largest)[1] - 12)
    while (too_large := largest > LARGEST[wire] * 2.0**exponents).any():
        exponents += too_large
    scaled = np.where(finite, blocks, 0) / 2.0**exponents
    if wire == "int8":
        quantized = np.rint(scaled) + 0.0  # integers have one zero
    else:
        import ml_dtypes

        quantized = scaled.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    dequantized = np.where(finite, quantized * 2.0**exponents, np.nan).astype(np.float32)
    return dequantized.reshape(-1)[: values.size]


def quantized_sum(parts: Sequence[Array], wire: str, op: str = "sum", *, results: bool = True) -> Array:
    """Return the reduction of ``parts``, which travel quantized, and so do the ``results``, or not."""
    total = round_trip(parts[0], wire)
    with np.errstate(all="ignore"):
        for part in parts[1:]:
            total = total + round_trip(part, wire)
        if op == "avg":
            total = total / np.float32(len(parts))
        if results:
            total = round_trip(total, wire)
        return total.astype(parts[0].dtype)


def bound(parts: Sequence[Array], wire: str, *, results: bool = True) -> npt.NDArray[np.float64]:
    """Return the most by which each element of `quantized_sum` may differ from the exact sum, as the docstring says."""
    error, count = ERROR[wire], parts[0].size
    rows = -(-count // BLOCK)
    largest = np.zeros(rows)
    for part in parts:
        padded = np.zeros(rows * BLOCK)
        padded[:count] = np.abs(part.astype(np.float64))
        largest += padded.reshape(rows, BLOCK).max(axis=1)
    relative = error * (2 + error) if results else error
    limit = np.repeat(largest * relative, BLOCK)[:count]
    # The sum in float32, the elements' type, and the least scale.
    rounding = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[parts[0].dtype.name]
    least = {"float32": 2.0**-126, "float16": 2.0**-24, "bfloat16": 2.0**-126}[parts[0].dtype.name]
    return limit + np.repeat(largest, BLOCK)[:count] * rounding * len(parts) + least * (len(parts) + 1)
