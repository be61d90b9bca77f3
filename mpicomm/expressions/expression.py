"""Expression: an expression of the user, read and checked. No part of its text goes to a compiler unchecked."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.functions import (
    AND,
    DIVIDE,
    FUNCTIONS,
    KINDS,
    MULTIPLY,
    NOT,
    OPERATORS,
    OR,
    POWER,
    WHERE,
    Function,
    Sort,
    kind_of,
)
from mpicomm.expressions.tree import (
    Apply,
    Array,
    AsNumber,
    AsTruth,
    Element,
    ExpressionNode,
    Number,
    Power,
    Truth,
    Values,
    Variable,
    is_index,
)

LONGEST = 300
"""The most letters of an expression, so that a compiler meets no deeper nesting of calls than it takes."""
MOST_EXPONENT = 64
"""The largest constant exponent that becomes multiplications."""
_LARGEST = 2**64 - 1
_MOST_SHOWN = 80  # letters of an expression in an error


@dataclass(frozen=True)
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

    def cpp(self, state: str) -> str:
        """Return it in C++, without spaces: functions of expressions.cuh on numbers of the type ``state``."""
        return self.tree.cpp(state)

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        """Return its value on NumPy arrays of ``dtype``. The caller ignores floating-point errors."""
        return self.tree.evaluate(dtype, values)

    def undefined(self, dtype: str) -> str | None:
        """Return why it is not defined on numbers of the dtype with this name, or None if it is defined."""
        return _undefined(self.tree, dtype)

    def require_defined(self, dtype: str) -> None:
        """Raise `InvalidUsageError` unless it is defined on numbers of the dtype with this name."""
        reason = self.undefined(dtype)
        if reason is not None:
            raise InvalidUsageError(f"{self.argument}={shown(self.text)} is not defined for {dtype}: {reason}")


def shown(text: Any) -> str:
    """Return an expression as errors show it: in quotes, and cut off if it is long."""
    return f"{text[:_MOST_SHOWN]!r}..." if isinstance(text, str) and len(text) > _MOST_SHOWN else repr(text)


@lru_cache
def _undefined(tree: ExpressionNode, dtype: str) -> str | None:
    """Return why an expression is not defined on numbers of a dtype, or None if it is defined."""
    kind = kind_of(dtype)
    if kind is None:
        return "it is for numbers, and bool"
    for node in tree.walk():
        given = node.kind if isinstance(node, Variable) else None
        if isinstance(node, Element):
            given = kind_of(node.array.dtype)
        if given is not None and KINDS.index(given) > KINDS.index(kind):
            name = node.array.name if isinstance(node, Element) else node.name if isinstance(node, Variable) else ""
            return f"{name} is {given}: convert it"
        if isinstance(node, Number) and kind == "bool":
            return f"{node.value} is no bool: use True or False"
        if isinstance(node, Number) and kind == "integer":
            if not isinstance(node.value, int):
                return f"{node.value} is no {dtype}: use an integer, or convert the data"
            if node.value > np.iinfo(dtype).max:
                return f"{node.value} is no {dtype}: the largest is {np.iinfo(dtype).max}"
        function = MULTIPLY if isinstance(node, Power) else node.function if isinstance(node, Apply) else None
        if function is not None and kind not in function.kinds:
            instead = function.instead or f"convert the {dtype}"
            return f"{function.label} is for {', '.join(function.kinds)}: {instead}"
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
    return Expression(argument, ast.unparse(parsed), reader.number(parsed))


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

    def number(self, tree: ast.expr) -> ExpressionNode:
        """Return a part as a number. A truth value becomes 1 or 0."""
        node = self._node(tree)
        return node if node.gives == "number" else AsNumber(node)

    def _truth(self, tree: ast.expr) -> ExpressionNode:
        node = self._node(tree)
        return node if node.gives == "truth" else AsTruth(node)

    def _of_sort(self, tree: ast.expr, sort: Sort) -> ExpressionNode:
        return self.number(tree) if sort == "number" else self._truth(tree)

    def _apply(self, function: Function, *operands: ast.expr) -> ExpressionNode:
        return Apply(function, tuple(map(self._of_sort, operands, function.takes)))

    def _node(self, tree: ast.expr) -> ExpressionNode:
        if isinstance(tree, ast.Constant):
            return self._constant(tree)
        if isinstance(tree, ast.Name):
            if tree.id not in self._numbers:
                raise self.error(f"{tree.id!r} is no name here: use {self._names}")
            return self._numbers[tree.id]
        if isinstance(tree, ast.Subscript):
            return self._element(tree)
        if isinstance(tree, ast.UnaryOp):
            if isinstance(tree.op, ast.Not):
                return self._apply(NOT, tree.operand)
            if isinstance(tree.op, ast.UAdd):
                return self.number(tree.operand)
            return self._apply(OPERATORS[type(tree.op)], tree.operand)
        if isinstance(tree, ast.BinOp):
            return self._binary(tree)
        if isinstance(tree, ast.BoolOp):
            function = AND if isinstance(tree.op, ast.And) else OR
            return self._joined(function, [self._truth(value) for value in tree.values])
        if isinstance(tree, ast.Compare):
            return self._comparison(tree)
        if isinstance(tree, ast.IfExp):
            return self._apply(WHERE, tree.test, tree.body, tree.orelse)
        if isinstance(tree, ast.Call):
            return self._call(tree)
        raise self._unknown(tree)

    def _element(self, tree: ast.Subscript) -> ExpressionNode:
        array = self._arrays.get(tree.value.id) if isinstance(tree.value, ast.Name) else None
        if array is None:
            raise self._unknown(tree)
        index = _Reader(self._text, self._indices, self._argument, (), ()).number(tree.slice)
        if not is_index(index):
            raise self.error(f"{ast.unparse(tree.slice)!r} is no index: compute it of integers with + - * // %")
        return Element(array, index)

    def _constant(self, tree: ast.Constant) -> ExpressionNode:
        value = tree.value
        if isinstance(value, bool):
            return Truth(value)
        if isinstance(value, int) and value > _LARGEST:
            raise self.error(f"{value} is too large: the largest integer is {_LARGEST}")
        if isinstance(value, float) and not math.isfinite(value):
            raise self.error("a number is too large: use one below 1.8e308")
        if isinstance(value, (int, float)):
            return Number(value)
        raise self._unknown(tree)

    def _binary(self, tree: ast.BinOp) -> ExpressionNode:
        if isinstance(tree.op, ast.Pow):
            return self._power(tree)
        function = OPERATORS.get(type(tree.op))
        if function is None:
            raise self._unknown(tree)
        return self._apply(function, tree.left, tree.right)

    def _power(self, tree: ast.BinOp) -> ExpressionNode:
        base, exponent = self.number(tree.left), _constant_exponent(tree.right)
        if exponent is None:
            return Apply(POWER, (base, self.number(tree.right)))
        if not 0 < abs(exponent) <= MOST_EXPONENT:
            raise self.error(f"the exponent {exponent} is not in 1 to {MOST_EXPONENT}, nor in -1 to -{MOST_EXPONENT}")
        power = Power(base, abs(exponent))
        return power if exponent > 0 else Apply(DIVIDE, (Number(1), power))

    def _comparison(self, tree: ast.Compare) -> ExpressionNode:
        operands = [self.number(operand) for operand in (tree.left, *tree.comparators)]
        compared = []
        for number, op in enumerate(tree.ops):
            function = OPERATORS.get(type(op))
            if function is None:  # `is` and `in`
                raise self._unknown(tree)
            compared.append(Apply(function, (operands[number], operands[number + 1])))
        return self._joined(AND, compared)

    def _call(self, tree: ast.Call) -> ExpressionNode:
        function = FUNCTIONS.get(tree.func.id) if isinstance(tree.func, ast.Name) else None
        if function is None:
            raise self.error(f"{ast.unparse(tree.func)!r} is no function here: use {', '.join(FUNCTIONS)}")
        given, taken = len(tree.args), len(function.takes)
        if tree.keywords or any(isinstance(argument, ast.Starred) for argument in tree.args):
            raise self._unknown(tree)
        if function.label in ("min", "max") and given > taken:
            return self._joined(function, [self.number(argument) for argument in tree.args])
        if given != taken:
            raise self.error(f"{function.label} takes {taken} operands, not {given}")
        return self._apply(function, *tree.args)

    def _joined(self, function: Function, operands: Sequence[ExpressionNode]) -> ExpressionNode:
        """Return a function of two operands, applied to several operands from the left to the right."""
        joined = operands[0]
        for operand in operands[1:]:
            joined = Apply(function, (joined, operand))
        return joined

    def _unknown(self, tree: ast.expr) -> InvalidUsageError:
        return self.error(
            f"{ast.unparse(tree)!r} is not possible here: use {self._names}, numbers, operators, "
            f"x if c else y, {', '.join(FUNCTIONS)}"
        )


def _constant_exponent(tree: ast.expr) -> int | None:
    """Return an exponent that is an integer literal, or None for all others."""
    sign = 1
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.USub):
        sign, tree = -1, tree.operand
    if isinstance(tree, ast.Constant) and type(tree.value) is int:
        return sign * tree.value
    return None
