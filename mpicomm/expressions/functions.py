"""The functions and operators of expressions: for each its name in expressions.cuh, and the same function of NumPy.

All operands and results of a function have the element type of the expression, except truth values, which comparisons,
``and``, ``or`` and ``not`` give.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

NumberKind = Literal["bool", "integer", "float", "complex"]
Sort = Literal["number", "truth"]

KINDS: tuple[NumberKind, ...] = ("bool", "integer", "float", "complex")
"""All kinds of elements. Numbers of a kind become numbers of a later kind if an expression needs them."""
_LETTERS: dict[str, NumberKind] = {"uint": "integer", "int": "integer", "bfloat": "float"}


def kind_of(dtype: str) -> NumberKind | None:
    """Return the kind of a dtype by its name, such as "float8_e5m2", or None for a dtype without numbers."""
    letters = dtype[: next((place for place, letter in enumerate(dtype) if not letter.islower()), len(dtype))]
    found = _LETTERS.get(letters, letters)
    return next((kind for kind in KINDS if kind == found), None)


_INTEGER: tuple[NumberKind, ...] = ("integer",)
_FLOAT: tuple[NumberKind, ...] = ("float",)
_BITS: tuple[NumberKind, ...] = ("bool", "integer")
_REAL: tuple[NumberKind, ...] = ("integer", "float")
_ORDERED: tuple[NumberKind, ...] = ("bool", "integer", "float")
_NUMBER: tuple[NumberKind, ...] = ("integer", "float", "complex")


@dataclass(frozen=True)
class Function:
    """A function or an operator."""

    label: str
    """Its name in an expression."""
    cpp: str
    """Its name in namespace ``fn`` of expressions.cuh."""
    numpy: Callable[..., Any]
    takes: tuple[Sort, ...]
    kinds: tuple[NumberKind, ...]
    """The kinds of elements for which it is defined."""
    gives: Sort = "number"
    instead: str = ""
    """The way out for kinds without it."""


def power(base: Any, exponent: int) -> Any:
    """Return a power as multiplications in the order of ``fn::power``, so that both have the same bits."""
    result = base
    for bit in bin(exponent)[3:]:
        result = result * result
        if bit == "1":
            result = result * base
    return result


def _larger(a: Any, b: Any) -> Any:
    # This is not np.maximum, because NumPy does not say whether that returns 0.0 or -0.0.
    return np.where((a > b) | (a != a), a, b)


def _smaller(a: Any, b: Any) -> Any:
    return np.where((a < b) | (a != a), a, b)


def _unary(
    label: str, cpp: str, numpy: Callable[..., Any], kinds: tuple[NumberKind, ...], instead: str = ""
) -> Function:
    return Function(label, cpp, numpy, ("number",), kinds, instead=instead)


def _binary(
    label: str, cpp: str, numpy: Callable[..., Any], kinds: tuple[NumberKind, ...], instead: str = ""
) -> Function:
    return Function(label, cpp, numpy, ("number", "number"), kinds, instead=instead)


def _comparison(label: str, cpp: str, numpy: Callable[..., Any], kinds: tuple[NumberKind, ...]) -> Function:
    return Function(label, cpp, numpy, ("number", "number"), kinds, "truth")


MULTIPLY = _binary("*", "multiply", np.multiply, _NUMBER, "use and")
DIVIDE = _binary("/", "divide", np.divide, _FLOAT, "use // for integers")
POWER = _binary("**", "pow", np.power, _FLOAT, "use a constant exponent such as a ** 2")
AND = Function("and", "both", np.logical_and, ("truth", "truth"), KINDS, "truth")
OR = Function("or", "either", np.logical_or, ("truth", "truth"), KINDS, "truth")
NOT = Function("not", "negation", np.logical_not, ("truth",), KINDS, "truth")
WHERE = Function("where", "where", np.where, ("truth", "number", "number"), KINDS)

OPERATORS: dict[type[ast.operator] | type[ast.unaryop] | type[ast.cmpop], Function] = {
    ast.Add: _binary("+", "add", np.add, _NUMBER, "use or"),
    ast.Sub: _binary("-", "subtract", np.subtract, _NUMBER, "use !="),
    ast.Mult: MULTIPLY,
    ast.Div: DIVIDE,
    ast.FloorDiv: _binary("//", "floor_divide", np.floor_divide, _INTEGER, "use floor(a / b) for floats"),
    ast.Mod: _binary("%", "remainder", np.remainder, _INTEGER, "use a - floor(a / b) * b for floats"),
    ast.BitAnd: _binary("&", "bit_and", np.bitwise_and, _BITS),
    ast.BitOr: _binary("|", "bit_or", np.bitwise_or, _BITS),
    ast.BitXor: _binary("^", "bit_xor", np.bitwise_xor, _BITS, "use ** for a power"),
    ast.LShift: _binary("<<", "shift_left", np.left_shift, _INTEGER),
    ast.RShift: _binary(">>", "shift_right", np.right_shift, _INTEGER),
    ast.USub: _unary("-", "negative", np.negative, _NUMBER, "use not"),
    ast.Invert: _unary("~", "invert", np.invert, _INTEGER, "use not"),
    ast.Lt: _comparison("<", "less", np.less, _ORDERED),
    ast.LtE: _comparison("<=", "less_equal", np.less_equal, _ORDERED),
    ast.Gt: _comparison(">", "greater", np.greater, _ORDERED),
    ast.GtE: _comparison(">=", "greater_equal", np.greater_equal, _ORDERED),
    ast.Eq: _comparison("==", "equal", np.equal, KINDS),
    ast.NotEq: _comparison("!=", "not_equal", np.not_equal, KINDS),
}

FUNCTIONS = {
    function.label: function
    for function in (
        _unary("abs", "abs", np.abs, _REAL),
        _unary("ceil", "ceil", np.ceil, _FLOAT),
        _unary("conj", "conj", np.conjugate, ("complex",)),
        _unary("exp", "exp", np.exp, _FLOAT),
        _unary("floor", "floor", np.floor, _FLOAT),
        _unary("log", "log", np.log, _FLOAT),
        _binary("max", "max", _larger, _ORDERED),
        _binary("min", "min", _smaller, _ORDERED),
        _unary("sqrt", "sqrt", np.sqrt, _FLOAT),
        _unary("tanh", "tanh", np.tanh, _FLOAT),
        WHERE,
    )
}
"""The functions by name. ``min`` and ``max`` take two or more operands."""
