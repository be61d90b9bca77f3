"""Bounds of indices: no index of an array in a kernel may lie beyond them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpicomm import InvalidUsageError
from mpicomm.expressions.expression import parse
from mpicomm.expressions.tree import Array, Element, Variable, bounds, elements_of

INDEX, K = Variable("i", "i", "integer"), Variable("k", "k", "integer")


def element(index: str) -> Element:
    (found,) = elements_of(parse(f"x[{index}]", (), "epilogue", (Array("x", "x", "int8"),), (INDEX, K)).tree)
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
def test_bounds_are_close(text: str, expected: tuple[int, int]) -> None:
    assert bounds(element(text).index, {"i": (0, 40), "k": (5, 5)}) == expected


def test_an_index_that_may_wrap_has_no_bounds() -> None:
    with pytest.raises(OverflowError):
        bounds(element("i * k // k").index, {"i": (0, 40), "k": (2**62, 2**62)})


@pytest.mark.parametrize("text", ["x", "x[y]", "x[i / 2]", "x[0.5]", "x[x[i]]", "x[i:]", "x[i, i]", "x[i < 3]"])
def test_what_is_no_index(text: str) -> None:
    with pytest.raises(InvalidUsageError, match=r"epilogue='x"):
        parse(text, (), "epilogue", (Array("x", "x", "int8"),), (INDEX, K))
