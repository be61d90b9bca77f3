"""The reductions of the GPU kernels, compiled for this machine's processor, against NumPy: the same code, so the same
numbers on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

from mpicomm.errors import InvalidUsageError
from mpicomm.kernels.reductions import REDUCTIONS, cpp_name, options_for
from mpicomm.kernels.variant import SHARED
from tests.helpers.references.reductions import NARROW, dtype_named, reduced, require_same, samples

pytest.importorskip("ml_dtypes")
if shutil.which("g++") is None:
    pytest.skip("there is no g++", allow_module_level=True)

PAIRS = [(dtype, op) for dtype, ops in REDUCTIONS.items() for op in ops]

SOURCE = """
#include "reduce.cuh"
using namespace mpicomm;
template <class T, class Op>
void run(const T* const* parts, u32 num_parts, T* out, u64 count) {
  for (u64 i = 0; i < count; ++i) {
    typename Op::State state = Op::first(parts[0][i]);
    for (u32 part = 1; part < num_parts; ++part) state = next_of<Op>(state, parts[part][i], part);
    out[i] = Op::last(state, num_parts);
  }
}
"""
REDUCE = """
extern "C" void reduce_{dtype}_{op}(const dtype::{cpp}* const* parts, u32 num_parts, dtype::{cpp}* out, u64 count) {{
  run<dtype::{cpp}, op::{op}<dtype::{cpp}>>(parts, num_parts, out, count);
}}
"""
CONVERT = """
extern "C" void encode_{dtype}(const float* in, dtype::{dtype}* out, u64 count) {{
  for (u64 i = 0; i < count; ++i) out[i] = dtype::{dtype}::encode(in[i]);
}}
extern "C" void decode_{dtype}(const dtype::{dtype}* in, float* out, u64 count) {{
  for (u64 i = 0; i < count; ++i) out[i] = in[i].decode();
}}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("reductions")
    source, target = directory / "reductions.cpp", directory / "reductions.so"
    reduce = [REDUCE.format(dtype=dtype, op=op, cpp=cpp_name(dtype)) for dtype, op in PAIRS]
    source.write_text("\n".join([SOURCE, *reduce, *(CONVERT.format(dtype=dtype) for dtype in NARROW)]))
    options = [
        "-std=c++17",
        "-O1",
        "-ffp-contract=off",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-fPIC",
        "-shared",
    ]
    command = ["g++", *options, f"-I{SHARED}", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


def address(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize(("dtype", "op"), PAIRS, ids=lambda name: name)
def test_reduces_as_numpy_does(library: ctypes.CDLL, dtype: str, op: str) -> None:
    rng = np.random.default_rng([ord(letter) for letter in dtype + op])
    for num_parts in (2, 3, 8):
        parts = [samples(dtype_named(dtype), 5000, rng) for _ in range(num_parts)]
        out = np.empty_like(parts[0])
        pointers = (ctypes.c_void_p * num_parts)(*(part.ctypes.data for part in parts))
        function = getattr(library, f"reduce_{dtype}_{op}")
        function(pointers, ctypes.c_uint32(num_parts), address(out), ctypes.c_uint64(out.size))
        require_same(out, reduced(op, parts))


@pytest.mark.parametrize("dtype", NARROW)
def test_every_number_of_a_narrow_format_is_known(library: ctypes.CDLL, dtype: str) -> None:
    element = dtype_named(dtype)
    numbers = np.arange(256**element.itemsize).astype(f"u{element.itemsize}").view(element)
    out = np.empty(numbers.size, np.float32)
    getattr(library, f"decode_{dtype}")(address(numbers), address(out), ctypes.c_uint64(out.size))
    with np.errstate(all="ignore"):
        require_same(out, numbers.astype(np.float32))


@pytest.mark.parametrize("dtype", NARROW)
def test_rounds_to_a_narrow_format_as_ml_dtypes_does(library: ctypes.CDLL, dtype: str) -> None:
    # All values of the upper 20 bits, which hold every tie, with the values right below and above each.
    upper = np.arange(1 << 20, dtype=np.uint32) << 12
    values = np.concatenate([upper, upper | 1, upper | 0xFFF]).view(np.float32)
    out = np.empty(values.size, dtype_named(dtype))
    getattr(library, f"encode_{dtype}")(address(values), address(out), ctypes.c_uint64(out.size))
    with np.errstate(all="ignore"):
        require_same(out, values.astype(out.dtype))


@pytest.mark.parametrize(
    ("reduction", "said"),
    [
        (("float32", "band"), "pass one of sum, prod"),
        (("complex64", "max"), "pass one of sum"),
        (("int32", "avg"), "pass one of"),
        (("float128", "sum"), "no operation is"),
    ],
)
def test_a_reduction_that_does_not_exist_is_refused(reduction: tuple[str, str], said: str) -> None:
    with pytest.raises(InvalidUsageError, match=said):
        options_for(reduction)
