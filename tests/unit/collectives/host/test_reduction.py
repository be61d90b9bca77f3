from __future__ import annotations

import operator
import platform
import warnings
from collections.abc import Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpicomm
from mpicomm.collectives.host import reduction as host_reduction
from mpicomm.collectives.host.reduction import OPERATIONS, Reducer
from tests.helpers.references.reductions import NARROW, dtype_named, has_result, reduced, require_same, samples

Array = npt.NDArray[Any]

DTYPES = [*"?bBhHiIqQfdgFD", *NARROW]
BLOCK = host_reduction._BLOCK_NBYTES


def dtype_of(name: str) -> np.dtype[Any]:
    try:
        return dtype_named(name)
    except ImportError:
        pytest.skip("needs ml_dtypes")


def run(op: str, parts: Sequence[Array], out: Array | None = None) -> Array:
    out = np.empty_like(parts[0]) if out is None else out
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("error")
        Reducer(op, parts[0].dtype).reduce(parts, out)
    return out


def expected(op: str, parts: Sequence[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    if op == "prod" and parts[0].dtype.kind == "c":
        with np.errstate(all="ignore"):  # as NumPy does it, fused or not
            return fold(operator.mul, parts)
    return reduced(op, parts)


def same(actual: Array, wanted: Array) -> None:
    if actual.dtype.name == "longdouble" or actual.dtype.char == "g":  # has padding
        np.testing.assert_array_equal(actual, wanted)
        return
    require_same(actual, wanted)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("op", OPERATIONS)
def test_matches_the_reference_on_special_values(op: str, name: str) -> None:
    dtype = dtype_of(name)
    if not has_result(op, dtype):
        return
    rng = np.random.default_rng([OPERATIONS.index(op), DTYPES.index(name)])
    for number in (1, 2, 3, 5):
        for count in (0, 1, 2, 7, 64, 1000):
            if dtype.char == "g":
                parts = [rng.standard_normal(count).astype(dtype) for _ in range(number)]
            else:
                parts = [samples(dtype, count, rng) for _ in range(number)]
            if op in {"max", "min"} and platform.machine() != "x86_64":
                parts = [np.where(part == 0, dtype.type(0), part) for part in parts]
            wanted = expected(op, parts)
            same(run(op, parts), wanted)
            for own in range(number):  # in place of any one of the parts
                copies = [part.copy() for part in parts]
                same(run(op, copies, copies[own]), wanted)


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("name", ["f", "h", "D", "float16", "bfloat16"])
def test_blocks_do_not_change_the_result(name: str, number: int) -> None:
    dtype = dtype_of(name)
    accumulator = 4 if name in NARROW else dtype.itemsize
    per_block = BLOCK // accumulator
    rng = np.random.default_rng(number)
    for count in (per_block - 1, per_block, per_block + 1, 3 * per_block + 17):
        parts = [samples(dtype, count, rng) for _ in range(number)]
        same(run("sum", parts), expected("sum", parts))
        copies = [part.copy() for part in parts]
        same(run("sum", copies, copies[1]), expected("sum", parts))


@pytest.mark.parametrize("char", ["F", "D"])
def test_complex_products_do_not_depend_on_where_the_array_is_cut(char: str) -> None:
    rng = np.random.default_rng(1)
    dtype = np.dtype(char)
    parts = [(rng.standard_normal(65) + 1j * rng.standard_normal(65)).astype(dtype) for _ in range(3)]
    whole = run("prod", parts)
    for cut in range(65):
        for piece in (slice(0, cut), slice(cut, 65), slice(cut, cut + 1)):
            for own in range(3):
                copies = [part.copy()[piece] for part in parts]
                assert run("prod", copies, copies[own]).tobytes() == whole[piece].tobytes()


@given(parts=st.integers(1, 9), leaves=st.sampled_from([1, 2, 4, 8]), name=st.sampled_from(["float32", "float16"]))
def test_a_tree_of_trees_is_a_tree(parts: int, leaves: int, name: str) -> None:
    rng, dtype = np.random.default_rng([parts, leaves]), np.dtype(name)
    with np.errstate(all="ignore"):
        whole = (rng.standard_normal((leaves * parts, 50)) * 1e4).astype(dtype)
        partial = [mpicomm.tree_sum(whole[leaves * part : leaves * (part + 1)]) for part in range(parts)]
        assert run("tree", partial).astype(dtype).tobytes() == reduced("tree", list(whole)).tobytes()


def test_tree_sum_along_an_axis() -> None:
    x = np.arange(24.0).reshape(3, 8, 1)
    assert (mpicomm.tree_sum(x, 1) == x.sum(1)).all() and mpicomm.tree_sum(x, -1).shape == (3, 8)
    assert isinstance(mpicomm.tree_sum(np.ones(4)), np.ndarray)  # a buffer, so that a call takes it
    with pytest.raises(mpicomm.InvalidUsageError, match="axis 0 has 3 slices: pass a power of two"):
        mpicomm.tree_sum(x)


def test_narrow_floats_are_rounded_once() -> None:
    parts = [np.array([value], np.float16) for value in (2048.0, 2050.0, 2050.0)]
    assert run("avg", parts)[0] == np.float16(np.float32(6148.0) / np.float32(3))
    large = [np.array([60000.0], np.float16)] * 4
    assert run("avg", large)[0] == 60000.0  # without the division the sum would be infinite


def test_memory_it_needs_does_not_grow_with_the_arrays() -> None:
    reducer = Reducer("sum", np.dtype(np.float16))
    parts = [np.ones(1_000_000, np.float16)] * 3
    reducer.reduce(parts, np.empty_like(parts[0]))
    assert sum(scratch.nbytes for scratch in reducer._scratch) <= 2 * BLOCK
