"""Expression: an expression of the user, read and checked. No part of its text goes to a compiler unchecked.

It is a tree. Each node knows its CUDA C++ and its value on NumPy arrays.
"""

from __future__ import annotations

import ast
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any

import numpy as np

from mpicomm.errors import InvalidUsageError
from mpicomm.expressions import functions
from mpicomm.expressions.functions import FUNCTIONS, KINDS, OPERATORS, Function, NumberKind, Sort, kind_of

LONGEST = 300
"""The most letters of an expression, so that a compiler meets no deeper nesting of calls than it takes."""
MOST_EXPONENT = 64
"""The largest constant exponent that becomes multiplications."""
_LARGEST = 2**64 - 1
_MOST_SHOWN = 80  # letters of a text that is too long
_LARGEST_INDEX = 2**63 - 1
_INDEX_TYPE = np.dtype(np.int64)

Range = tuple[int, int]
"""The least and the largest value."""
Values = Mapping[str, Any]
"""Arrays or scalars, by the names of an expression."""


class ExpressionNode(ABC):
    """A part of an expression."""

    children: tuple[ExpressionNode, ...] = ()
    """The parts of the node."""

    @property
    def sort(self) -> Sort:
        """The sort of its value."""
        return "number"

    @abstractmethod
    def cpp(self, state: str) -> str:
        """Return it in C++, without spaces. ``state`` is the type of the computation."""

    @abstractmethod
    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        """Return its value on NumPy arrays. A number has the type ``dtype``. Callers ignore floating-point errors."""

    def walk(self) -> Iterator[ExpressionNode]:
        """Yield it and all nodes below it."""
        yield self
        for node in self.children:
            yield from node.walk()


@dataclass(frozen=True)
class Number(ExpressionNode):
    """A literal, which becomes a number of the element type."""

    value: int | float

    def cpp(self, state: str) -> str:
        # Both forms are exact, because a hexadecimal float has all bits.
        text = f"{self.value}ull" if isinstance(self.value, int) else self.value.hex()
        return f"fn::literal<{state}>({text})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return dtype.type(self.value if dtype.kind in "iu" else float(self.value))


@dataclass(frozen=True)
class Variable(ExpressionNode):
    """A name, which becomes a number of the element type. Arrays have only `Element` in a tree."""

    name: str
    code: str
    """The name's value in C++, or the address of an array's elements."""
    kind: NumberKind | None = None
    """The kind of the value, or of an array's elements; None for the element type."""

    def cpp(self, state: str) -> str:
        return self.code if self.kind is None else f"fn::number<{state}>({self.code})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        value = values[self.name]
        return value if self.kind is None else value.astype(dtype)


@dataclass(frozen=True)
class Element(ExpressionNode):
    """An element of an array, which becomes a number of the element type. The index is computed in 64 bits."""

    array: Variable
    index: ExpressionNode

    def cpp(self, state: str) -> str:
        return f"fn::element<{state}>({self.array.code},{self.index.cpp('i64')})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return values[self.array.name][self.index.evaluate(_INDEX_TYPE, values)].astype(dtype)


@dataclass(frozen=True)
class Apply(ExpressionNode):
    """A function of other nodes. Each node gives the sort of value that the function takes."""

    function: Function
    children: tuple[ExpressionNode, ...] = ()

    @property
    def sort(self) -> Sort:
        return self.function.sort

    def cpp(self, state: str) -> str:
        return f"{self.function.cpp}({','.join(node.cpp(state) for node in self.children)})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return self.function.numpy(*(node.evaluate(dtype, values) for node in self.children))


@dataclass(frozen=True)
class TruthAsNumber(ExpressionNode):
    """The number of a truth value: 1 or 0."""

    children: tuple[ExpressionNode]

    def cpp(self, state: str) -> str:
        return f"fn::number<{state}>({self.children[0].cpp(state)})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return self.children[0].evaluate(dtype, values).astype(dtype)


@dataclass(frozen=True, eq=False)
class Expression:
    """An expression of numbers of one element type."""

    argument: str
    """The name of the user's argument, for errors."""
    text: str
    """The expression in its normal form, which does not depend on the user's spaces and parentheses."""
    tree: ExpressionNode
    names: frozenset[str]
    """The names in it: of variables, arrays and functions."""

    def require_defined(self, dtype: str) -> None:
        """Raise `InvalidUsageError` unless it is defined on numbers of the dtype with this name."""
        reason = undefined(self, dtype)
        if reason is not None:
            raise InvalidUsageError(f"{self.argument}={self.text!r} is not defined for {dtype}: {reason}")


@lru_cache
def undefined(expression: Expression, dtype: str) -> str | None:
    """Return why an expression is not defined on numbers of the dtype with this name, or None if it is defined."""
    kind = kind_of(dtype)
    if kind is None:
        return "it is for numbers, and bool"
    for node in expression.tree.walk():
        if isinstance(node, (Variable, Element)):
            given = node if isinstance(node, Variable) else node.array
            if given.kind is not None and KINDS.index(given.kind) > KINDS.index(kind):
                return f"{given.name} is {given.kind}: convert it"
        elif isinstance(node, Number):
            if kind == "bool":
                return f"{node.value} is no bool: use True or False"
            if kind == "integer" and not isinstance(node.value, int):
                return f"{node.value} is no {dtype}: use an integer, or convert the data"
            if kind == "integer" and node.value > np.iinfo(dtype).max:
                return f"{node.value} is no {dtype}: the largest is {np.iinfo(dtype).max}"
        elif isinstance(node, Apply) and kind not in node.function.kinds:
            instead = node.function.hint or f"convert the {dtype}"
            return f"{node.function.label} is for {', '.join(node.function.kinds)}: {instead}"
    return None


@lru_cache
def parse(
    text: str,
    numbers: tuple[Variable, ...],
    argument: str,
    arrays: tuple[Variable, ...] = (),
    indices: tuple[Variable, ...] = (),
) -> Expression:
    """Return the expression of a text with names of ``numbers`` and ``arrays``; subscripts use ``indices``. Local.

    Raises `InvalidUsageError` for anything but these names, literals, operators and `FUNCTIONS`. The error names
    ``argument`` and the part of the text.
    """
    if not isinstance(text, str):
        raise TypeError(f"{argument}={text!r} is no expression: pass text such as {'a + b'!r}")
    if len(text) > LONGEST:
        begin = text[:_MOST_SHOWN]
        raise InvalidUsageError(f"{argument}={begin!r}...: it has {len(text)} letters: write it with at most {LONGEST}")
    reader = _Reader(text, numbers, argument, arrays, indices)
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise reader.error(f"it is no expression of Python ({error})") from None
    names = frozenset(node.id for node in ast.walk(parsed) if isinstance(node, ast.Name))
    return Expression(argument, ast.unparse(parsed), reader.read(parsed), names)


class _Reader:
    """Turns Python's tree into nodes. Raises `InvalidUsageError`."""

    def __init__(
        self,
        text: str,
        numbers: Sequence[Variable],
        argument: str,
        arrays: Sequence[Variable],
        indices: Sequence[Variable],
    ) -> None:
        self._text = text
        self._numbers = {number.name: number for number in numbers}
        self._argument = argument
        self._arrays = {array.name: array for array in arrays}
        self._indices = indices
        self._names = ", ".join([*self._numbers, *(f"{name}[...]" for name in self._arrays)])

    def error(self, reason: str) -> InvalidUsageError:
        return InvalidUsageError(f"{self._argument}={self._text!r}: {reason}")

    def read(self, tree: ast.expr, sort: Sort = "number") -> ExpressionNode:
        """Return a part as a number or as a truth value. A truth value becomes the number 1 or 0."""
        node = self._node(tree)
        if node.sort == sort:
            return node
        return TruthAsNumber((node,)) if sort == "number" else Apply(functions.IS_TRUE, (node,))

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
                return _fold(function, [self.read(value, "truth") for value in values])
            case ast.Compare(left, signs, others) if all(type(sign) in OPERATORS for sign in signs):  # no `is` and `in`
                operands = [self.read(operand) for operand in (left, *others)]
                pairs = zip(signs, operands, operands[1:], strict=False)
                return _fold(functions.AND, [Apply(OPERATORS[type(sign)], (a, b)) for sign, a, b in pairs])
            case ast.IfExp(test, body, orelse):
                return self._apply(functions.WHERE, test, body, orelse)
            case ast.Call(called, operands_given, keywords):
                return self._call(tree, called, operands_given, keywords)
        raise self._unknown(tree)

    def _apply(self, function: Function, *operands: ast.expr) -> ExpressionNode:
        return Apply(function, tuple(map(self.read, operands, function.operands)))

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
            return _fold(function, [self.read(operand) for operand in operands])
        if len(operands) != len(function.operands):
            raise self.error(f"{function.label} takes {len(function.operands)} operands, not {len(operands)}")
        return self._apply(function, *operands)

    def _unknown(self, tree: ast.expr) -> InvalidUsageError:
        return self.error(
            f"{ast.unparse(tree)!r} is not possible here: use {self._names}, numbers, operators, "
            f"x if c else y, {', '.join(FUNCTIONS)}"
        )


def _fold(function: Function, operands: Sequence[ExpressionNode]) -> ExpressionNode:
    """Return a function of two operands, applied to several operands from the left to the right."""
    return reduce(lambda before, operand: Apply(function, (before, operand)), operands)


def is_index(node: ExpressionNode) -> bool:
    """Return whether `bounds` knows all parts of a node."""
    if isinstance(node, Apply):
        return node.function.label in ("+", "-", "*", "//", "%") and all(map(is_index, node.children))
    return isinstance(node, Variable) or (isinstance(node, Number) and isinstance(node.value, int))


def bounds(node: ExpressionNode, ranges: Mapping[str, Range]) -> Range:
    """Return bounds of an index. ``ranges`` has the range of each name; each value in a range may occur or not.

    Raises OverflowError if a part of the index may need more than 64 bits, because it would wrap there.
    """
    if isinstance(node, Variable):
        low, high = ranges[node.name]
    elif isinstance(node, Number):
        low = high = int(node.value)
    else:
        assert isinstance(node, Apply)
        low, high = _bounds_of(node.function.label, [bounds(each, ranges) for each in node.children])
    if low < -_LARGEST_INDEX or high > _LARGEST_INDEX:
        raise OverflowError
    return low, high


_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv}


def _bounds_of(label: str, operands: list[Range]) -> Range:
    if len(operands) == 1:
        return -operands[0][1], -operands[0][0]
    left, right = operands
    if label in ("//", "%") and right[0] <= 0:  # no quotient or rest is larger than these
        most = max(map(abs, (*left, *right)))
        return -most, most
    if label == "%":
        return left if left[0] >= 0 and left[1] < right[0] else (0, right[1] - 1)
    ends = [_OPERATIONS[label](x, y) for x in left for y in right]
    return min(ends), max(ends)
