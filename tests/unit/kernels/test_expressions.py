"""Expressions of the user in C++, compiled for this machine's processor, against the same expressions in NumPy."""

from __future__ import annotations

import ctypes
import random
import shutil
import subprocess
from typing import Any

import numpy as np
import pytest

from mpicomm.expressions.expression import Expression, parse, undefined
from mpicomm.expressions.functions import FUNCTIONS, OPERATORS
from mpicomm.expressions.tree import Variable
from mpicomm.kernels.reductions import cpp_name
from mpicomm.kernels.variant import SHARED
from tests.helpers.references.reductions import require_same, samples

if shutil.which("g++") is None:
    pytest.skip("there is no g++", allow_module_level=True)

NAMES = (Variable("a", "a"), Variable("b", "b"))
DTYPES = ("bool", "int8", "uint8", "int32", "int64", "uint64", "float32", "float64", "complex64")
# The last bits of these are the library's. The others are NumPy's, bit for bit.
ROUNDED = ("exp", "log", "tanh", "**")
LITERALS = ("0", "1", "3", "7", "127", "2.5", "True", "False")
COUNT = 2000

SOURCE = """
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
            texts.append(f"{label}({', '.join('ab'[: len(function.takes)])})")
    return texts


def some_expression(rng: random.Random, depth: int) -> str:
    """An expression of several functions, which may not be defined for a type."""
    if depth == 0 or rng.random() < 0.1:
        return rng.choice(("a", "b", "a", "b", rng.choice(LITERALS)))
    operands = [some_expression(rng, depth - 1) for _ in range(3)]
    labels = [function.label for function in OPERATORS.values() if len(function.takes) == 2]
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
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("expressions")
    source, target = directory / "expressions.cpp", directory / "expressions.so"
    functions = [
        FUNCTION.format(name=f"{dtype}_{number}", dtype=cpp_name(dtype), text=expression.tree.cpp("State"))
        for dtype in DTYPES
        for number, expression in enumerate(expressions(dtype))
    ]
    source.write_text("\n".join([SOURCE, *functions]))
    options = ["-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared"]
    result = subprocess.run(
        ["g++", *options, f"-I{SHARED}", str(source), "-o", str(target)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return ctypes.CDLL(str(target))


def operand(dtype: np.dtype[Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if dtype.kind != "c":
        return samples(dtype, COUNT, rng)
    # Values with exact products, because NumPy fuses products and sums of complex numbers if the processor can.
    return (rng.integers(-4, 5, COUNT) + 1j * rng.integers(-4, 5, COUNT)).astype(dtype)


def address(array: np.ndarray[Any, Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_has_the_bits_of_numpy(library: ctypes.CDLL, dtype: str) -> None:
    rng = np.random.default_rng(len(dtype))
    for number, expression in enumerate(expressions(dtype)):
        a, b = (operand(np.dtype(dtype), rng) for _ in range(2))
        if number % 2 and a.dtype.kind in "iu":
            b = (b % 9 - (4 if dtype[0] == "i" else 0)).astype(dtype)  # small divisors, shifts and powers
        out = np.empty_like(a)
        getattr(library, f"{dtype}_{number}")(address(a), address(b), address(out), ctypes.c_uint64(out.size))
        with np.errstate(all="ignore"):
            expected = np.broadcast_to(expression.tree.evaluate(a.dtype, {"a": a, "b": b}), a.shape)
        try:
            require_same(out, np.ascontiguousarray(expected))
        except AssertionError as error:
            raise AssertionError(f"{expression.text} of {dtype}: {error}") from None
