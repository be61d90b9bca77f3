"""Expression: an expression of the user, read and checked. No part of its text goes to a compiler unchecked."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from mpicomm.errors import InvalidUsageError
from mpicomm.expressions import functions
from mpicomm.expressions.functions import FUNCTIONS, KINDS, OPERATORS, Function, Sort, kind_of
from mpicomm.expressions.tree import Apply, Array, AsNumber, Element, ExpressionNode, Number, Variable, is_index

LONGEST = 300
"""The most letters of an expression, so that a compiler meets no deeper nesting of calls than it takes."""
MOST_EXPONENT = 64
"""The largest constant exponent that becomes multiplications."""
_LARGEST = 2**64 - 1
_MOST_SHOWN = 80  # letters of an expression in an error


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression of numbers of one element type."""

    argument: str
    """The name of the user's argument, for errors."""
    text: str
    """The expression in its normal form, which does not depend on the user's spaces and parentheses."""
    tree: ExpressionNode

    @property
    def names(self) -> frozenset[str]:
        """The names of its variables and arrays, also in subscripts."""
        nodes = [*self.tree.walk()]
        inside = [each for node in nodes if isinstance(node, Element) for each in node.index.walk()]
        arrays = {node.array.name for node in nodes if isinstance(node, Element)}
        return frozenset(arrays | {node.name for node in (*nodes, *inside) if isinstance(node, Variable)})

    def require_defined(self, dtype: str) -> None:
        """Raise `InvalidUsageError` unless it is defined on numbers of the dtype with this name."""
        reason = undefined(self, dtype)
        if reason is not None:
            raise InvalidUsageError(f"{self.argument}={shown(self.text)} is not defined for {dtype}: {reason}")


def shown(text: Any) -> str:
    """Return an expression as errors show it: in quotes, and cut off if it is long."""
    return f"{text[:_MOST_SHOWN]!r}..." if isinstance(text, str) and len(text) > _MOST_SHOWN else repr(text)


@lru_cache
def undefined(expression: Expression, dtype: str) -> str | None:
    """Return why an expression is not defined on numbers of the dtype with this name, or None if it is defined."""
    kind = kind_of(dtype)
    if kind is None:
        return "it is for numbers, and bool"
    for node in expression.tree.walk():
        if isinstance(node, (Variable, Element)):
            name, given = (
                (node.name, node.kind) if isinstance(node, Variable) else (node.array.name, kind_of(node.array.dtype))
            )
            if given is not None and KINDS.index(given) > KINDS.index(kind):
                return f"{name} is {given}: convert it"
        elif isinstance(node, Number):
            if kind == "bool":
                return f"{node.value} is no bool: use True or False"
            if kind == "integer" and not isinstance(node.value, int):
                return f"{node.value} is no {dtype}: use an integer, or convert the data"
            if kind == "integer" and node.value > np.iinfo(dtype).max:
                return f"{node.value} is no {dtype}: the largest is {np.iinfo(dtype).max}"
        elif isinstance(node, Apply) and kind not in node.function.kinds:
            instead = node.function.instead or f"convert the {dtype}"
            return f"{node.function.label} is for {', '.join(node.function.kinds)}: {instead}"
    return None


@lru_cache
def parse(
    text: str,
    numbers: tuple[Variable, ...],
    argument: str,
    arrays: tuple[Array, ...] = (),
    indices: tuple[Variable, ...] = (),
) -> Expression:
    """Return the expression of a text with names of ``numbers`` and ``arrays``; subscripts use ``indices``. Local.

    Raises `InvalidUsageError` for anything but these names, literals, operators and `FUNCTIONS`. The error names
    ``argument`` and the part of the text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{argument}={text!r} is no expression: pass text such as {'a + b'!r}")
    reader = _Reader(text, numbers, argument, arrays, indices)
    if len(text) > LONGEST:
        raise reader.error(f"it has {len(text)} letters: write it with at most {LONGEST}")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise reader.error(f"it is no expression of Python ({error})") from None
    return Expression(argument, ast.unparse(parsed), reader.read(parsed))


class _Reader:
    """Turns Python's tree into nodes. Raises `InvalidUsageError`."""

    def __init__(
        self,
        text: str,
        numbers: Sequence[Variable],
        argument: str,
        arrays: Sequence[Array],
        indices: Sequence[Variable],
    ) -> None:
        self._text = text
        self._numbers = {number.name: number for number in numbers}
        self._argument = argument
        self._arrays = {array.name: array for array in arrays}
        self._indices = indices
        self._names = ", ".join([*self._numbers, *(f"{name}[...]" for name in self._arrays)])

    def error(self, reason: str) -> InvalidUsageError:
        return InvalidUsageError(f"{self._argument}={shown(self._text)}: {reason}")

    def read(self, tree: ast.expr, sort: Sort = "number") -> ExpressionNode:
        """Return a part as a number or as a truth value. A truth value becomes the number 1 or 0."""
        node = self._node(tree)
        if node.gives == sort:
            return node
        return AsNumber(node) if sort == "number" else Apply(functions.IS_TRUE, (node,))

    def _node(self, tree: ast.expr) -> ExpressionNode:
        match tree:
            case ast.Constant(bool() as value):
                return Apply(functions.TRUTHS[value])
            case ast.Constant(int() | float() as value):
                if isinstance(value, int) and value > _LARGEST:
                    raise self.error(f"{value} is too large: the largest integer is {_LARGEST}")
                if not math.isfinite(value):
                    raise self.error("a number is too large: use one below 1.8e308")
                return Number(value)
            case ast.Name(name):
                if name not in self._numbers:
                    raise self.error(f"{name!r} is no name here: use {self._names}")
                return self._numbers[name]
            case ast.Subscript(ast.Name(name), place) if name in self._arrays:
                index = _Reader(self._text, self._indices, self._argument, (), ()).read(place)
                if not is_index(index):
                    raise self.error(f"{ast.unparse(place)!r} is no index: compute it of integers with + - * // %")
                return Element(self._arrays[name], index)
            case ast.UnaryOp(ast.UAdd(), operand):
                return self.read(operand)
            case ast.UnaryOp(unary, operand):
                return self._apply(functions.NOT if isinstance(unary, ast.Not) else OPERATORS[type(unary)], operand)
            case ast.BinOp(base, ast.Pow(), exponent):
                return self._power(base, exponent)
            case ast.BinOp(left, binary, right) if type(binary) in OPERATORS:
                return self._apply(OPERATORS[type(binary)], left, right)
            case ast.BoolOp(joint, values):
                function = functions.AND if isinstance(joint, ast.And) else functions.OR
                return _joined(function, [self.read(value, "truth") for value in values])
            case ast.Compare(left, signs, others) if all(type(sign) in OPERATORS for sign in signs):  # no `is` and `in`
                operands = [self.read(operand) for operand in (left, *others)]
                pairs = zip(signs, operands, operands[1:], strict=False)
                return _joined(functions.AND, [Apply(OPERATORS[type(sign)], (a, b)) for sign, a, b in pairs])
            case ast.IfExp(test, body, orelse):
                return self._apply(functions.WHERE, test, body, orelse)
            case ast.Call(called, operands_given, keywords):
                return self._call(tree, called, operands_given, keywords)
        raise self._unknown(tree)

    def _apply(self, function: Function, *operands: ast.expr) -> ExpressionNode:
        return Apply(function, tuple(map(self.read, operands, function.takes)))

    def _power(self, base: ast.expr, exponent: ast.expr) -> ExpressionNode:
        match exponent:
            case ast.Constant(int() as constant) if not isinstance(constant, bool):
                pass
            case ast.UnaryOp(ast.USub(), ast.Constant(int() as constant)) if not isinstance(constant, bool):
                constant = -constant
            case _:
                return self._apply(functions.POWER, base, exponent)
        if not 0 < abs(constant) <= MOST_EXPONENT:
            raise self.error(f"the exponent {constant} is not in 1 to {MOST_EXPONENT}, nor in -1 to -{MOST_EXPONENT}")
        power = self._apply(functions.power_of(abs(constant)), base)
        return power if constant > 0 else Apply(functions.DIVIDE, (Number(1), power))

    def _call(
        self, tree: ast.expr, called: ast.expr, operands: list[ast.expr], keywords: list[ast.keyword]
    ) -> ExpressionNode:
        function = FUNCTIONS.get(called.id) if isinstance(called, ast.Name) else None
        if function is None:
            raise self.error(f"{ast.unparse(called)!r} is no function here: use {', '.join(FUNCTIONS)}")
        if keywords or any(isinstance(operand, ast.Starred) for operand in operands):
            raise self._unknown(tree)
        if function.label in ("min", "max") and len(operands) > 2:
            return _joined(function, [self.read(operand) for operand in operands])
        if len(operands) != len(function.takes):
            raise self.error(f"{function.label} takes {len(function.takes)} operands, not {len(operands)}")
        return self._apply(function, *operands)

    def _unknown(self, tree: ast.expr) -> InvalidUsageError:
        return self.error(
            f"{ast.unparse(tree)!r} is not possible here: use {self._names}, numbers, operators, "
            f"x if c else y, {', '.join(FUNCTIONS)}"
        )


def _joined(function: Function, operands: Sequence[ExpressionNode]) -> ExpressionNode:
    """Return a function of two operands, applied to several operands from the left to the right."""
    return reduce(lambda before, operand: Apply(function, (before, operand)), operands)
