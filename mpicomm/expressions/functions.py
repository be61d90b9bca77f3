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
_KIND_OF: dict[str, NumberKind] = {"bool": "bool", "int": "integer", "uint": "integer", "complex": "complex"}
_KIND_OF |= {"float": "float", "bfloat": "float"}


def kind_of(dtype: str) -> NumberKind | None:
    """Return the kind of a dtype by its name, such as "float8_e5m2", or None for a dtype without numbers."""
    return _KIND_OF.get(dtype.partition("_")[0].rstrip("0123456789"))


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
    kinds: tuple[NumberKind, ...]
    """The kinds of elements for which it is defined."""
    hint: str = ""
    """The way out for kinds without it."""
    operands: tuple[Sort, ...] = ("number", "number")
    sort: Sort = "number"


_unary, _comparison = partial(Function, operands=("number",)), partial(Function, sort="truth")
_logical = partial(Function, kinds=KINDS, operands=("truth", "truth"), sort="truth")

MULTIPLY = Function("*", "fn::multiply", np.multiply, _NUMBER, "use and")
DIVIDE = Function("/", "fn::divide", np.divide, _FLOAT, "use // for integers")
POWER = Function("**", "fn::pow", np.power, _FLOAT, "use a constant exponent such as a ** 2")
AND, OR = _logical("and", "fn::both", np.logical_and), _logical("or", "fn::either", np.logical_or)
NOT = _logical("not", "fn::negation", np.logical_not, operands=("truth",))
WHERE = Function("where", "fn::where", np.where, KINDS, operands=("truth", "number", "number"))
TRUTHS = {  # in C++ bool() is false
    False: Function("False", "bool", partial(np.bool_, False), KINDS, operands=(), sort="truth"),
    True: Function("True", "!bool", partial(np.bool_, True), KINDS, operands=(), sort="truth"),
}
IS_TRUE = Function("bool", "is_true", lambda number: number != 0, KINDS, operands=("number",), sort="truth")


def power_of(exponent: int) -> Function:
    """Return the power by a constant, at least 1: multiplications, in the order of ``fn::power`` for the same bits."""

    def power(base: Any) -> Any:
        result = base
        for bit in bin(exponent)[3:]:
            result = result * result
            if bit == "1":
                result = result * base
        return result

    return _unary("**", f"fn::power<{exponent}>", power, _NUMBER, "use and")


OPERATORS: dict[type[ast.operator] | type[ast.unaryop] | type[ast.cmpop], Function] = {
    ast.Add: Function("+", "fn::add", np.add, _NUMBER, "use or"),
    ast.Sub: Function("-", "fn::subtract", np.subtract, _NUMBER, "use !="),
    ast.Mult: MULTIPLY,
    ast.Div: DIVIDE,
    ast.FloorDiv: Function("//", "fn::floor_divide", np.floor_divide, _INTEGER, "use floor(a / b) for floats"),
    ast.Mod: Function("%", "fn::remainder", np.remainder, _INTEGER, "use a - floor(a / b) * b for floats"),
    ast.BitAnd: Function("&", "fn::bit_and", np.bitwise_and, _BITS),
    ast.BitOr: Function("|", "fn::bit_or", np.bitwise_or, _BITS),
    ast.BitXor: Function("^", "fn::bit_xor", np.bitwise_xor, _BITS, "use ** for a power"),
    ast.LShift: Function("<<", "fn::shift_left", np.left_shift, _INTEGER),
    ast.RShift: Function(">>", "fn::shift_right", np.right_shift, _INTEGER),
    ast.USub: _unary("-", "fn::negative", np.negative, _NUMBER, "use not"),
    ast.Invert: _unary("~", "fn::invert", np.invert, _INTEGER, "use not"),
    ast.Lt: _comparison("<", "fn::less", np.less, _ORDERED),
    ast.LtE: _comparison("<=", "fn::less_equal", np.less_equal, _ORDERED),
    ast.Gt: _comparison(">", "fn::greater", np.greater, _ORDERED),
    ast.GtE: _comparison(">=", "fn::greater_equal", np.greater_equal, _ORDERED),
    ast.Eq: _comparison("==", "fn::equal", np.equal, KINDS),
    ast.NotEq: _comparison("!=", "fn::not_equal", np.not_equal, KINDS),
}

FUNCTIONS = {
    function.label: function
    for function in (
        _unary("abs", "fn::abs", np.abs, _REAL),
        _unary("ceil", "fn::ceil", np.ceil, _FLOAT),
        _unary("conj", "fn::conj", np.conjugate, ("complex",)),
        _unary("exp", "fn::exp", np.exp, _FLOAT),
        _unary("floor", "fn::floor", np.floor, _FLOAT),
        _unary("log", "fn::log", np.log, _FLOAT),
        # Not np.maximum and np.minimum, because NumPy does not say whether these return 0.0 or -0.0.
        Function("max", "fn::max", lambda a, b: np.where((a > b) | (a != a), a, b), _ORDERED),
        Function("min", "fn::min", lambda a, b: np.where((a < b) | (a != a), a, b), _ORDERED),
        _unary("sqrt", "fn::sqrt", np.sqrt, _FLOAT),
        _unary("tanh", "fn::tanh", np.tanh, _FLOAT),
        WHERE,
    )
}
"""The functions by name. ``min`` and ``max`` take two or more operands."""
