"""The reductions of the GPU kernels, compiled for this machine's processor, against NumPy: the same code, so the same
numbers on a GPU."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ml_dtypes")

from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.expression import Expression, Variable, parse, undefined
from mpicomm.expressions.functions import FUNCTIONS, OPERATORS
from mpicomm.kernels.reductions import REDUCTIONS, cpp_name, options_for
from mpicomm.kernels.variant import KERNEL_DIR
from tests.helpers.references.reductions import NARROW, dtype_named, reduced, require_same, samples

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


def compiled(directory: Path, *texts: str) -> ctypes.CDLL:
    """Return a library of C++ functions for this machine's processor."""
    source, target = directory / "functions.cpp", directory / "functions.so"
    source.write_text("\n".join(texts))
    options = ["-std=c++17", "-O0", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command = ["g++", *options, "-fPIC", "-shared", f"-I{KERNEL_DIR}", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    reduce = [REDUCE.format(dtype=dtype, op=op, cpp=cpp_name(dtype)) for dtype, op in PAIRS]
    convert = (CONVERT.format(dtype=dtype) for dtype in NARROW)
    return compiled(tmp_path_factory.mktemp("reductions"), SOURCE, *reduce, *convert)


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
def test_converts_narrow_formats_as_ml_dtypes_does(library: ctypes.CDLL, dtype: str) -> None:
    element = dtype_named(dtype)
    numbers = np.arange(256**element.itemsize).astype(f"u{element.itemsize}").view(element)
    # All values of the upper 20 bits, which hold every tie, with the values right below and above each.
    upper = np.arange(1 << 20, dtype=np.uint32) << 12
    values = np.concatenate([upper, upper | 1, upper | 0xFFF]).view(np.float32)
    for name, given, into in (("decode", numbers, np.dtype(np.float32)), ("encode", values, element)):
        out = np.empty(given.size, into)
        getattr(library, f"{name}_{dtype}")(address(given), address(out), ctypes.c_uint64(out.size))
        with np.errstate(all="ignore"):
            require_same(out, given.astype(into))


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


NAMES = (Variable("a", "a"), Variable("b", "b"))
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint64", "float32", "float64", "complex64")
# The last bits of these are the library's. The others are NumPy's, bit for bit.
ROUNDED = ("exp", "log", "tanh", "**")
LITERALS = ("0", "1", "3", "7", "127", "2.5", "True", "False")
COUNT = 2000

EXPRESSIONS = """
#include "expressions.cuh"
using namespace mpicomm;
"""
FUNCTION = """
extern "C" void {name}(const dtype::{dtype}* x, const dtype::{dtype}* y, dtype::{dtype}* out, u64 count) {{
  using T = dtype::{dtype};
  using State = Number<T>::Value;
  for (u64 i = 0; i < count; ++i) {{
    [[maybe_unused]] const State a = Number<T>::decode(x[i]), b = Number<T>::decode(y[i]);
    out[i] = Number<T>::encode({text});
  }}
}}
"""


def every_function() -> list[str]:
    """Each operator and function by itself."""
    labels = {function.label for function in OPERATORS.values()} - {"~"}
    texts = [f"a {label} b" for label in sorted(labels)] + ["-a", "~a", "a ** 7", "a ** -3", "a and b", "a or b"]
    texts += ["not a", "a if b else 1", "where(a == b, a, b)", "a < b == True", "a * 18446744073709551615"]
    for label, function in FUNCTIONS.items():
        if label not in ROUNDED and label != "where":
            texts.append(f"{label}({', '.join('ab'[: len(function.operands)])})")
    return texts


def some_expression(rng: random.Random, depth: int) -> str:
    """An expression of several functions, which may not be defined for a type."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(("a", "b", "a", "b", rng.choice(LITERALS)))
    operands = [some_expression(rng, depth - 1) for _ in range(3)]
    labels = [function.label for function in OPERATORS.values() if len(function.operands) == 2]
    form = rng.randrange(6)
    if form < 3:
        return f"({operands[0]} {rng.choice(labels)} {operands[1]})"
    if form == 3:
        return f"({operands[0]} if {operands[1]} else {operands[2]})"
    if form == 4:
        return rng.choice((f"(-{operands[0]})", f"(not {operands[0]})", f"({operands[0]} ** {rng.randint(1, 5)})"))
    return f"{rng.choice(('min', 'max'))}({operands[0]}, {operands[1]})"


def expressions(dtype: str) -> list[Expression]:
    rng = random.Random(dtype)
    texts = every_function() + [some_expression(rng, 1 + number % 3) for number in range(400)]
    defined = [parsed for text in texts if undefined(parsed := parse(text, NAMES, "op"), dtype) is None]
    return [*{each.text: each for each in defined}.values()][:100]


@pytest.fixture(scope="module")
def compiled_expressions(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    functions = [
        FUNCTION.format(name=f"{dtype}_{number}", dtype=cpp_name(dtype), text=expression.tree.cpp("State"))
        for dtype in DTYPES
        for number, expression in enumerate(expressions(dtype))
    ]
    return compiled(tmp_path_factory.mktemp("expressions"), EXPRESSIONS, *functions)


def operand(dtype: np.dtype[Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if dtype.kind != "c":
        return samples(dtype, COUNT, rng)
    # Values with exact products, because NumPy fuses products and sums of complex numbers if the processor can.
    return (rng.integers(-4, 5, COUNT) + 1j * rng.integers(-4, 5, COUNT)).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_has_the_bits_of_numpy(compiled_expressions: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(len(dtype))
    for number, expression in enumerate(expressions(dtype)):
        a, b = (operand(np.dtype(dtype), rng) for _ in range(2))
        if number % 2 and a.dtype.kind in "iu":
            b = (b % 9 - (4 if dtype[0] == "i" else 0)).astype(dtype)  # small divisors, shifts and powers
        out = np.empty_like(a)
        getattr(compiled_expressions, f"{dtype}_{number}")(
            address(a), address(b), address(out), ctypes.c_uint64(out.size)
        )
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(expression.tree.evaluate(a.dtype, {"a": a, "b": b}), a.shape)
        try:
            require_same(out, np.ascontiguousarray(expected))
        except AssertionError as error:
            raise AssertionError(f"{expression.text} of {dtype}: {error}") from None
