"""The functions and operators of expressions: for each its name in expressions.cuh, and the same function of NumPy.

All operands and results of a function have the element type of the expression, except truth values, which comparisons,
``and``, ``or`` and ``not`` give.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
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
    """Its name in namespace ``mpicomm`` of C++."""
    numpy: Callable[..., Any]
    takes: tuple[Sort, ...]
    kinds: tuple[NumberKind, ...]
    """The kinds of elements for which it is defined."""
    gives: Sort = "number"
    instead: str = ""
    """The way out for kinds without it."""


def _function(
    label: str,
    cpp: str,
    numpy: Callable[..., Any],
    kinds: tuple[NumberKind, ...],
    instead: str = "",
    *,
    takes: tuple[Sort, ...] = ("number", "number"),
    gives: Sort = "number",
) -> Function:
    return Function(label, f"fn::{cpp}", numpy, takes, kinds, gives, instead)


_unary, _comparison = partial(_function, takes=("number",)), partial(_function, gives="truth")
_logical = partial(_function, kinds=KINDS, takes=("truth", "truth"), gives="truth")

MULTIPLY = _function("*", "multiply", np.multiply, _NUMBER, "use and")
DIVIDE = _function("/", "divide", np.divide, _FLOAT, "use // for integers")
POWER = _function("**", "pow", np.power, _FLOAT, "use a constant exponent such as a ** 2")
AND, OR = _logical("and", "both", np.logical_and), _logical("or", "either", np.logical_or)
NOT = _logical("not", "negation", np.logical_not, takes=("truth",))
WHERE = _function("where", "where", np.where, KINDS, takes=("truth", "number", "number"))
TRUTHS = {  # in C++ bool() is false
    value: Function(str(value), "bool" if not value else "!bool", partial(np.bool_, value), (), KINDS, "truth")
    for value in (False, True)
}
IS_TRUE = Function("bool", "is_true", lambda number: number != 0, ("number",), KINDS, "truth")


def power_of(exponent: int) -> Function:
    """Return the power by a constant, at least 1: multiplications, in the order of ``fn::power`` for the same bits."""

    def power(base: Any) -> Any:
        result = base
        for bit in bin(exponent)[3:]:
            result = result * result
            if bit == "1":
                result = result * base
        return result

    return Function("**", f"fn::power<{exponent}>", power, ("number",), _NUMBER, instead="use and")


OPERATORS: dict[type[ast.operator] | type[ast.unaryop] | type[ast.cmpop], Function] = {
    ast.Add: _function("+", "add", np.add, _NUMBER, "use or"),
    ast.Sub: _function("-", "subtract", np.subtract, _NUMBER, "use !="),
    ast.Mult: MULTIPLY,
    ast.Div: DIVIDE,
    ast.FloorDiv: _function("//", "floor_divide", np.floor_divide, _INTEGER, "use floor(a / b) for floats"),
    ast.Mod: _function("%", "remainder", np.remainder, _INTEGER, "use a - floor(a / b) * b for floats"),
    ast.BitAnd: _function("&", "bit_and", np.bitwise_and, _BITS),
    ast.BitOr: _function("|", "bit_or", np.bitwise_or, _BITS),
    ast.BitXor: _function("^", "bit_xor", np.bitwise_xor, _BITS, "use ** for a power"),
    ast.LShift: _function("<<", "shift_left", np.left_shift, _INTEGER),
    ast.RShift: _function(">>", "shift_right", np.right_shift, _INTEGER),
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
        # Not np.maximum and np.minimum, because NumPy does not say whether these return 0.0 or -0.0.
        _function("max", "max", lambda a, b: np.where((a > b) | (a != a), a, b), _ORDERED),
        _function("min", "min", lambda a, b: np.where((a < b) | (a != a), a, b), _ORDERED),
        _unary("sqrt", "sqrt", np.sqrt, _FLOAT),
        _unary("tanh", "tanh", np.tanh, _FLOAT),
        WHERE,
    )
}
"""The functions by name. ``min`` and ``max`` take two or more operands."""
