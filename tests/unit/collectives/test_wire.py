"""Quantization by NumPy: the values of a plain reference, and the error bound that the docstrings state."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

pytest.importorskip("ml_dtypes")

from mpicomm.activity.layout import format_call
from mpicomm.collectives import wire
from mpicomm.collectives.signature import Signature, hash_with_count
from mpicomm.collectives.wire import QUANTIZABLE, WIRE_DTYPES
from tests.helpers.references.reductions import BLOCK, ERROR, Array, bound, dtype_named, quantized_sum, round_trip


def dequantized(values: Array, wire_dtype: str) -> Array:
    quantized = np.empty(wire.quantized_nbytes(values.size), np.uint8)
    wire.quantize(values, wire_dtype, quantized)
    assert not (quantized[: -(values.size // -BLOCK) * BLOCK] == 0xFF).any()
    assert (quantized[-(values.size // -BLOCK) * BLOCK :] != 0).all()
    result = np.empty(values.size, np.float32)
    wire.dequantize(quantized, wire_dtype, result)
    return result


def summed(parts: list[Array], wire_dtype: str, *, results: bool) -> Array:
    """Return the sum of the parts of several ranks, as the way of host arrays computes it."""
    total = dequantized(parts[0], wire_dtype)
    for part in parts[1:]:
        quantized = np.empty(wire.quantized_nbytes(part.size), np.uint8)
        wire.quantize(part, wire_dtype, quantized)
        wire.dequantize(quantized, wire_dtype, total, adds=True)
    return (dequantized(total, wire_dtype) if results else total).astype(parts[0].dtype)


bits_of_floats = st.integers(0, 300).flatmap(lambda count: arrays.arrays(np.uint32, count))
"""Bits of any floats: also NaNs, infinities, subnormals and zeros."""


@st.composite
def contributions(draw: st.DrawFn) -> list[Array]:
    """Finite numbers of several ranks, of magnitudes whose sum is finite in the element type."""
    dtype = dtype_named(draw(st.sampled_from(QUANTIZABLE)))
    size, count = draw(st.integers(1, 5)), draw(st.integers(1, 300))
    low, high = (-20, 10) if dtype.name == "float16" else (-130, 100)
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    exponents = rng.uniform(low, draw(st.integers(low, high)), (size, count))
    return [*(rng.uniform(-1, 1, (size, count)) * np.exp2(exponents)).astype(dtype)]


@given(bits=bits_of_floats, wire_dtype=st.sampled_from(WIRE_DTYPES))
@example(bits=np.array([0x7F77FFFF, 0x7F780000], np.uint32), wire_dtype="float8_e4m3fn")
@example(bits=np.array([0x7F7DFFFF, 0x7F7FFFFF], np.uint32), wire_dtype="int8")
def test_values_are_those_of_the_reference(bits: Array, wire_dtype: str) -> None:
    values = bits.view(np.float32)
    with np.errstate(over="ignore"):  # the nearest code of the largest numbers stands for 2**128
        expected = round_trip(values, wire_dtype)
    got = dequantized(values, wire_dtype)
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    finite = ~np.isnan(expected)
    assert np.array_equal(got[finite].view(np.uint32), expected[finite].view(np.uint32))


@given(values=arrays.arrays(np.float32, st.integers(1, 300), elements=st.floats(-(2.0**127), 2.0**127, width=32)))
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_quantized_values_stay_the_same(values: Array, wire_dtype: str) -> None:
    once = dequantized(values, wire_dtype)
    assert np.array_equal(dequantized(once, wire_dtype), once)


@given(parts=contributions(), wire_dtype=st.sampled_from(WIRE_DTYPES), results=st.booleans())
def test_sums_keep_the_stated_bound(parts: list[Array], wire_dtype: str, results: bool) -> None:
    sums = summed(parts, wire_dtype, results=results)
    assert np.array_equal(sums, quantized_sum(parts, wire_dtype, results=results))
    got = sums.astype(np.float64)
    exact = np.sum([part.astype(np.float64) for part in parts], axis=0)
    assert (np.abs(got - exact) <= bound(parts, wire_dtype, results=results)).all()


@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_the_bound_is_no_larger_than_needed(wire_dtype: str) -> None:
    values = np.zeros(BLOCK, np.float32)
    # With int8, 63.6 needs the scale 1, and 10.5 lies between two integers. With float8, 264 lies between 256 and 288.
    values[:2] = (63.6, 10.5) if wire_dtype == "int8" else (272, 272)
    worst = float(np.abs(dequantized(values, wire_dtype) - values).max()) / float(values[0])
    assert ERROR[wire_dtype] * 0.9 < worst <= ERROR[wire_dtype]


def test_any_number_of_elements_and_of_blocks() -> None:
    rng = np.random.default_rng(1)
    for count in (0, 1, 127, 128, 129, 70_000, 200_001):
        values = rng.standard_normal(count).astype(np.float32)
        for wire_dtype in WIRE_DTYPES:
            got = dequantized(values, wire_dtype)
            assert np.array_equal(got, round_trip(values, wire_dtype))
            total = np.ones(count, np.float32)
            quantized = np.empty(wire.quantized_nbytes(count), np.uint8)
            wire.quantize(values, wire_dtype, quantized)
            wire.dequantize(quantized, wire_dtype, total, adds=True)
            assert np.array_equal(total, np.float32(1) + got)


def test_each_count_has_another_hash() -> None:
    counts = [None, *range(2000), *(1 << bit for bit in range(11, 60)), (1 << 32) + 1, 3 << 32]
    hashes = {hash_with_count(0xFFFFFFFF, count) for count in counts}
    assert len(hashes) == len(counts)
    assert all(0 <= each < 1 << 32 for each in hashes)


def test_the_text_without_a_count_takes_any_count() -> None:
    for op in ("sum", None):
        assert format_call(Signature("Allreduce", "float32", 0, op).text_without_count(), 7, 0) == str(
            Signature("Allreduce", "float32", 7, op)
        )
    of_no_count = Signature("Allgatherv", "bytes", root=1)
    assert of_no_count.text_without_count() == str(of_no_count)
    assert "root=1" in str(of_no_count)
