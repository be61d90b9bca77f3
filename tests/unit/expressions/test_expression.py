"""Expressions that are read, with their meaning on NumPy arrays, and expressions that are refused with a way out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm import InvalidUsageError
from mpicomm.expressions.expression import LONGEST, Element, Expression, Variable, bounds, parse
from tests.helpers.references.reductions import require_same

NAMES = (Variable("a", "a"), Variable("b", "b"))
A = np.array([7, -7, 7, -7, 0, 3], np.int32)
B = np.array([2, 2, -2, -2, 0, 0], np.int32)
NOT_POSSIBLE = "is not possible here"


def read(text: str) -> Expression:
    return parse(text, NAMES, "op")


def value(text: str, a: Any, b: Any) -> Any:
    with np.errstate(all="ignore"):
        return read(text).tree.evaluate(a.dtype, {"a": a, "b": b})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a // b", [3, -4, -4, 3, 0, 0]),
        ("a % b", [1, 1, -1, -1, 0, 0]),
        ("a ** 3 - -b", [345, -341, 341, -345, 0, 27]),
        ("a << b", [28, -28, 0, 0, 0, 3]),
        ("-7 >> a", [-1, -1, -1, -1, -7, -1]),
        ("~a & 6 | b ^ 3", [1, 7, -3, -1, 7, 7]),
        ("min(a, b, 1)", [1, -7, -2, -7, 0, 0]),
        ("a < b <= 2", [0, 1, 0, 1, 0, 0]),
        ("(a > 0) + (b != 0)", [2, 1, 2, 1, 0, 1]),
        ("a and not b", [0, 0, 0, 0, 0, 1]),
        ("a or b", [1, 1, 1, 1, 0, 1]),
        ("where(b, a, 5)", [7, -7, 7, -7, 5, 5]),
        ("a if b == 2 else abs(a)", [7, -7, 7, 7, 0, 3]),
        ("1 if True and a == a else 2", [1, 1, 1, 1, 1, 1]),
        ("+a", A.tolist()),
    ],
)
def test_integers(text: str, expected: list[int]) -> None:
    result = value(text, A, B)
    assert np.broadcast_to(result, A.shape).tolist() == expected
    assert result.dtype == A.dtype


def test_numbers_take_the_type_of_the_elements() -> None:
    a = np.array([0.1, 2.5], np.float32)
    require_same(value("a * 0.1", a, a), a * np.float32(0.1))
    require_same(value("sqrt(a) ** -2", a, a), np.float32(1) / (np.sqrt(a) * np.sqrt(a)))
    assert value("a + 200", np.array([100], np.uint8), A).tolist() == [44]
    assert value("conj(a) * 2", np.array([1 + 2j], np.complex64), A).tolist() == [2 - 4j]
    assert np.isnan(value("max(a, b)", np.array([np.nan, 1.0]), np.array([1.0, np.nan]))).all()


def test_the_text_has_one_form() -> None:
    assert read("( a )+b*2").text == read("a + b * 2").text == "a + b * 2"
    assert read("(a + b) * 2").text != read("a + b * 2").text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('__import__("os").system("true")', "is no function here: use abs, ceil"),
        ("a.real", "'a.real' is not possible here: use a, b, numbers, operators"),
        *((text, "it is no expression of Python") for text in ("a); while (1) {}; (b", "a; b", "a\0", "(" * 290 + "a")),
        ("a + c", "'c' is no name here: use a, b"),
        ("State", "'State' is no name here"),
        *((text, NOT_POSSIBLE) for text in ("a[0]", "[a for a in b]", "lambda: a", "(a := b)", "a @ b", "a is b")),
        *((text, NOT_POSSIBLE) for text in ("f'{a}'", "'a'", "2j", "min(*a)", "sqrt(x=a)")),
        ("sqrt(a, b)", "sqrt takes 1 operands, not 2"),
        ("max(a)", "max takes 2 operands, not 1"),
        ("a ** 65", "the exponent 65 is not in 1 to 64"),
        ("a ** 0", "the exponent 0 is not in 1 to 64"),
        (f"a + {2**64}", "the largest integer is 18446744073709551615"),
        ("a + 1e999", "a number is too large"),
        ("a" + " + a" * LONGEST, f"write it with at most {LONGEST}"),
    ],
)
def test_everything_else_is_refused(text: str, said: str) -> None:
    with pytest.raises(InvalidUsageError, match="op=") as raised:
        read(text)
    assert said in str(raised.value)


def test_an_error_shows_the_begin_of_a_long_text_and_of_what_is_no_text() -> None:
    with pytest.raises(InvalidUsageError) as raised:
        read("a + " * 25_000)
    assert str(raised.value).startswith(f"op={'a + ' * 20!r}...: it has 100000 letters")
    assert len(str(raised.value)) < 200
    with pytest.raises(TypeError, match="op=3 is no expression"):
        parse(3, NAMES, "op")


def test_the_names_are_those_in_use() -> None:
    arrays = (Variable("c", "c", "float"), Variable("d", "d", "float"))
    expression = parse("a * 2 + c[i % k]", NAMES, "epilogue", arrays, (Variable("i", "i"), Variable("k", "k")))
    assert expression.names == {"a", "c", "i", "k"}


@pytest.mark.parametrize(
    ("text", "dtype", "said"),
    [
        ("a / b", "int32", "/ is for float: use // for integers"),
        ("a // b", "float32", "// is for integer: use floor(a / b) for floats"),
        ("sqrt(a)", "complex64", "sqrt is for float: convert the complex64"),
        ("a < b", "complex128", "< is for bool, integer, float"),
        ("a + b", "bool", "+ is for integer, float, complex: use or"),
        ("a ** 2", "bool", "** is for integer, float, complex: use and"),
        ("a or 1", "bool", "1 is no bool: use True or False"),
        ("a + 0.5", "uint8", "0.5 is no uint8: use an integer"),
        ("a & 256", "uint8", "256 is no uint8: the largest is 255"),
        ("a | b", "bfloat16", "| is for bool, integer"),
        ("a", "MPI.BYTE", "it is for numbers, and bool"),
    ],
)
def test_types_for_which_an_expression_is_not_defined(text: str, dtype: str, said: str) -> None:
    with pytest.raises(InvalidUsageError) as raised:
        read(text).require_defined(dtype)
    assert f"op={text!r} is not defined for {dtype}: " in str(raised.value)
    assert said in str(raised.value)


def test_numbers_that_are_equal_have_types_of_their_own_and_floats_have_all_names() -> None:
    read("a + b * 1").require_defined("int32")
    with pytest.raises(InvalidUsageError, match=r"1\.0 is no int32"):
        read("a + b * 1.0").require_defined("int32")
    for dtype in ("float16", "bfloat16", "float8_e5m2", np.dtype("longdouble").name):
        read("sqrt(a) / b").require_defined(dtype)


INDEX, K = Variable("i", "i", "integer"), Variable("k", "k", "integer")


def element(index: str) -> Element:
    found = parse(f"x[{index}]", (), "epilogue", (Variable("x", "x", "integer"),), (INDEX, K)).tree
    assert isinstance(found, Element)
    return found


def texts(operands: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.builds("({} {} {})".format, operands, st.sampled_from(["+", "-", "*", "//", "%"]), operands) | st.builds(
        "(-{})".format, operands
    )


@given(st.recursive(st.sampled_from(["i", "k", "0", "3", "7"]), texts, max_leaves=6), st.integers(-9, 9))
def test_no_index_lies_beyond_its_bounds(text: str, k: int) -> None:
    index = element(text).index
    least, largest = bounds(index, {"i": (0, 40), "k": (k, k)})
    with np.errstate(all="ignore"):
        values = index.evaluate(np.dtype(np.int64), {"i": np.arange(41), "k": np.int64(k)})
    assert least <= np.min(values) and np.max(values) <= largest


@pytest.mark.parametrize(
    ("text", "expected"),
    [("i", (0, 40)), ("i % 7", (0, 6)), ("i % 50", (0, 40)), ("i // 7", (0, 5)), ("3 - i * k", (-197, 3))],
)
def test_bounds_are_close_and_an_index_that_may_wrap_has_none(text: str, expected: tuple[int, int]) -> None:
    assert bounds(element(text).index, {"i": (0, 40), "k": (5, 5)}) == expected
    with pytest.raises(OverflowError):
        bounds(element(f"{text} + i * k // k").index, {"i": (0, 40), "k": (2**62, 2**62)})


@pytest.mark.parametrize("text", ["x", "x[y]", "x[i / 2]", "x[0.5]", "x[x[i]]", "x[i:]", "x[i, i]", "x[i < 3]"])
def test_what_is_no_index(text: str) -> None:
    with pytest.raises(InvalidUsageError, match=r"epilogue='x"):
        parse(text, (), "epilogue", (Variable("x", "x", "integer"),), (INDEX, K))
