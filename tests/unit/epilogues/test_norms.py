"""Norms by NumPy are close to exact norms, for all types, shapes and biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm.epilogues import layer_norm, rms_norm
from mpicomm.mpi.arguments import parse
from tests.helpers.references.reductions import dtype_named

pytest.importorskip("ml_dtypes")

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
        return "-DMPICOMM_ALIGNED" in bound.fused(0).options

    assert is_for_aligned() and is_for_aligned(residual_at=16)
    assert not is_for_aligned(residual_at=4)
    assert not is_for_aligned(weight_at=516)
    assert not is_for_aligned(output_at=(1 << 20) + 8)
    assert not is_for_aligned(count=6)  # rows of 24 bytes


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
    epilogue.bind("Allreduce", dtype, parse(out, writable=True, name="recvbuf")).on_host(values.ravel(), out.ravel())
    assert np.allclose(residual.astype(np.float64), h, rtol=EPS[name], atol=EPS[name])
    rounded = residual.astype(np.float64)  # the norm is of the stored residual
    shifted = rounded - rounded.mean(axis=1, keepdims=True) if centred else rounded
    expected = shifted / np.sqrt((shifted**2).mean(axis=1, keepdims=True) + 0.5) * weight.astype(np.float64)
    if centred and biases[1]:
        expected = expected + bias.astype(np.float64)
    assert np.allclose(out.astype(np.float64), expected, rtol=4 * EPS[name], atol=16 * EPS[name])
