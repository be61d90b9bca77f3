"""Norms by NumPy are close to exact norms, and block-scaled values are within the error of their types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("ml_dtypes")

from mpicomm.epilogues import Elementwise, Epilogue, layer_norm, rms_norm
from mpicomm.epilogues.block_scaled import GROUPS, LARGEST, QuantizedFormat, quantize, scales_of
from mpicomm.mpi.arguments import parse
from tests.helpers.references.reductions import dtype_named

EPS = {"float64": 2.0**-50, "float32": 2.0**-20, "float16": 2.0**-10, "bfloat16": 2.0**-7}  # with some room


def test_a_kernel_for_aligned_arrays_gets_no_others() -> None:
    rows, hidden = 3, 8
    memory = np.zeros(1024, np.uint8)
    start = -memory.ctypes.data % 16

    def is_for_aligned(
        residual_at: int = 0, weight_at: int = 512, output_at: int = 1 << 20, count: int = hidden
    ) -> bool:
        residual = np.frombuffer(memory, np.float32, rows * count, start + residual_at)
        weight = np.frombuffer(memory, np.float32, count, start + weight_at)
        receive = parse(np.empty(rows * count, np.float32), writable=True, name="recvbuf")
        bound = rms_norm(residual, weight).bind("Allreduce", np.dtype(np.float32), receive)
        bound.output = output_at
        options, _ = bound.fused(0)
        return "-DMPICOMM_ALIGNED" in options

    assert is_for_aligned() and is_for_aligned(residual_at=16)
    assert not is_for_aligned(residual_at=4)
    assert not is_for_aligned(weight_at=516)
    assert not is_for_aligned(output_at=(1 << 20) + 8)
    assert not is_for_aligned(count=6)  # rows of 24 bytes


ONES = np.ones(8, np.float32)
SCALED = [lambda scale: Elementwise("v * scale", scale=scale), lambda scale: rms_norm(ONES, ONES, scale=scale)]


@pytest.mark.parametrize("make", SCALED)
def test_calls_with_zeros_of_different_signs_share_no_plan(make: Callable[[float], Epilogue]) -> None:
    """The numbers are equal, but the results have other bits."""
    assert make(0.0).constants == make(0.0).constants != make(-0.0).constants


@given(
    name=st.sampled_from(sorted(EPS)),
    rows=st.integers(1, 4),
    hidden=st.integers(1, 700),
    biases=st.tuples(st.booleans(), st.booleans()),
    centred=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_norms_are_close_to_exact_norms(
    name: str, rows: int, hidden: int, biases: tuple[bool, bool], centred: bool, seed: int
) -> None:
    rng, dtype = np.random.default_rng(seed), dtype_named(name)

    def numbers(*shape: int, of: Any = dtype) -> Any:
        return rng.standard_normal(shape).astype(of)

    values, residual, out = numbers(rows, hidden), numbers(rows, hidden), np.empty((rows, hidden), dtype)
    weight, bias, linear = numbers(hidden, of=np.float32), numbers(hidden, of=np.float32), numbers(hidden)
    h = values.astype(np.float64) + residual.astype(np.float64) + (linear.astype(np.float64) if biases[0] else 0)
    more = {"linear_bias": linear} if biases[0] else {}
    if centred:
        epilogue = layer_norm(residual, weight, bias if biases[1] else None, 0.5, **more)
    else:
        epilogue = rms_norm(residual, weight, 0.5, **more)
    epilogue.bind("Allreduce", dtype, parse(out, writable=True, name="recvbuf")).apply_on_host(
        values.ravel(), out.ravel()
    )
    assert np.allclose(residual.astype(np.float64), h, rtol=EPS[name], atol=EPS[name])
    rounded = residual.astype(np.float64)  # the norm is of the stored residual
    shifted = rounded - rounded.mean(axis=1, keepdims=True) if centred else rounded
    expected = shifted / np.sqrt((shifted**2).mean(axis=1, keepdims=True) + 0.5) * weight.astype(np.float64)
    if centred and biases[1]:
        expected = expected + bias.astype(np.float64)
    assert np.allclose(out.astype(np.float64), expected, rtol=4 * EPS[name], atol=16 * EPS[name])


ml_dtypes = pytest.importorskip("ml_dtypes")

FORMATS = [(type_, scales) for type_ in LARGEST for scales in ("float32", "float8_e8m0fnu", "float8_e4m3fn")]
STORED = {"float32": np.float32, "float8_e8m0fnu": np.uint8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn}


def dequantized(kind: QuantizedFormat, values: Any) -> tuple[Any, Any]:
    """Return the quantized values and the scales of rows, as ml_dtypes reads them."""
    rows, hidden = values.shape
    columns = hidden // (kind.group or hidden)
    out = np.zeros((rows, hidden // kind.per_byte), np.uint8)
    scales = np.zeros(scales_of(rows, columns, tiled=kind.tiled), STORED[kind.scales or ""])
    with np.errstate(all="ignore"):
        quantize(kind, values, 0, out, scales)
    if kind.per_byte == 2:
        out = np.stack([out & 15, out >> 4], axis=2).reshape(rows, hidden)
    read = scales.view(ml_dtypes.float8_e8m0fnu) if kind.scales == "float8_e8m0fnu" else scales
    return out.view(getattr(ml_dtypes, kind.type)).astype(np.float64), read.astype(np.float64)


@pytest.mark.parametrize(("type_", "kind"), FORMATS, ids="-".join)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    group=st.sampled_from((0, *GROUPS)),
    exponent=st.integers(-6, 6),
)
def test_block_scaled_values_are_close(type_: str, kind: str, seed: int, rows: int, group: int, exponent: int) -> None:
    rng = np.random.default_rng(seed)
    values = (rng.standard_normal((rows, 384)) * 2.0**exponent).astype(np.float32)
    values[0, :128] = 0
    read, scales = dequantized(QuantizedFormat(type_, kind, group), values)
    groups = values.reshape(rows, -1, group or 384).astype(np.float64)
    factors = scales.reshape(rows, -1, 1)
    peaks = np.abs(groups).max(axis=2, keepdims=True)
    largest, exact = float(LARGEST[type_]), peaks / float(LARGEST[type_])
    if kind == "float32":
        assert np.allclose(factors, np.maximum(exact, np.finfo(np.float32).tiny), rtol=1e-6)
    elif kind == "float8_e8m0fnu":  # the least power of two with which no code saturates
        assert (factors >= exact).all() and ((factors < 2 * exact) | (peaks == 0)).all()
    else:
        assert np.allclose(factors, np.minimum(exact, 448), rtol=2.0**-4, atol=2.0**-10)
    # The step between quantized values is at most this part of a value, or a fixed part of the smallest ones.
    part, least = {"float8_e4m3fn": (2**-3, 2**-9), "float8_e5m2": (2**-2, 2**-16), "float4_e2m1fn": (0.5, 0.5)}[type_]
    reached = np.minimum(np.abs(groups), factors * largest)  # larger values saturate
    error = np.abs(np.copysign(reached, groups) - read.reshape(groups.shape) * factors)
    assert (error <= np.maximum(reached * part, factors * least) / 2 * 1.0001).all()


@pytest.mark.parametrize(("type_", "kind"), FORMATS, ids="-".join)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_the_scale_of_a_group_that_is_not_finite_is_nan(type_: str, kind: str, value: float) -> None:
    values = np.ones((2, 64), np.float32)
    values[1, 40] = value
    _, scales = dequantized(QuantizedFormat(type_, kind, 32), values)
    assert np.isnan(scales).tolist() == [False, False, False, True]


def test_four_bits_round_to_the_nearest_code_and_ties_to_even() -> None:
    bounds = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6], np.float32)
    values = np.concatenate([np.nextafter(bounds, np.float32(0)), bounds, np.nextafter(bounds, np.float32(9))])
    values = np.concatenate([values, -values]).reshape(3, 16)
    out = np.zeros((3, 8), np.uint8)
    quantize(QuantizedFormat("float4_e2m1fn"), values, 0, out, None)
    bits = np.stack([out & 15, out >> 4], axis=2).reshape(values.shape)
    expected = np.clip(values, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    assert (bits == expected.view(np.uint8) & 15).all()


def test_scales_in_tiles_lie_as_the_products_of_cublas_take_them() -> None:
    rows, hidden = 130, 32 * 5
    values = np.repeat(2.0 ** np.arange(1, 6), 32)[None, :] * np.ones((rows, 1))
    values[64:] *= 2.0**8
    values[129:] *= 2.0**8
    kind = QuantizedFormat("float8_e4m3fn", "float8_e8m0fnu", 32, tiled=True)
    _, tiled = dequantized(kind, values.astype(np.float32))
    _, linear = dequantized(kind._replace(tiled=False), values.astype(np.float32))
    # torch and vLLM describe it so: tiles of [32, 4, 4], in which 4 rows with a distance of 32 are neighbours.
    padded = np.full((256, 8), 2.0**-127)
    padded[:rows, :5] = linear.reshape(rows, 5)
    blocks = padded.reshape(2, 4, 32, 2, 4).transpose(0, 3, 2, 1, 4)
    assert hidden // 32 == 5 and (tiled == blocks.ravel()).all()
