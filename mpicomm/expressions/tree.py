"""The tree of an expression: each node knows its CUDA C++ and its value on NumPy arrays. Bounds of an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.expressions.functions import Function, NumberKind, Sort

_LARGEST = 2**63 - 1
_INDEX = np.dtype(np.int64)

Range = tuple[int, int]
"""The least and the largest value."""
Values = Mapping[str, Any]
"""Arrays or scalars, by the names of an expression."""


class ExpressionNode(ABC):
    """A part of an expression."""

    @property
    def gives(self) -> Sort:
        """The sort of its value."""
        return "number"

    @property
    def below(self) -> tuple[ExpressionNode, ...]:
        """The parts of the node."""
        return ()

    @abstractmethod
    def cpp(self, state: str) -> str:
        """Return it in C++, without spaces. ``state`` is the type of the computation."""

    @abstractmethod
    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        """Return its value on NumPy arrays. A number has the type ``dtype``. Callers ignore floating-point errors."""

    def walk(self) -> Iterator[ExpressionNode]:
        """Yield it and all nodes below it."""
        yield self
        for node in self.below:
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
    """A name, which becomes a number of the element type."""

    name: str
    code: str
    """The name's value in C++."""
    kind: NumberKind | None = None
    """The kind of the value; None for the element type."""

    def cpp(self, state: str) -> str:
        return self.code if self.kind is None else f"fn::number<{state}>({self.code})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        value = values[self.name]
        return value if self.kind is None else value.astype(dtype)


@dataclass(frozen=True)
class Array:
    """The name of an array."""

    name: str
    code: str
    """The address of its elements in C++."""
    dtype: str


@dataclass(frozen=True)
class Element(ExpressionNode):
    """An element of an array, which becomes a number of the element type. The index is computed in 64 bits."""

    array: Array
    index: ExpressionNode

    def cpp(self, state: str) -> str:
        return f"fn::element<{state}>({self.array.code},{self.index.cpp('i64')})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return values[self.array.name][self.index.evaluate(_INDEX, values)].astype(dtype)


@dataclass(frozen=True)
class Apply(ExpressionNode):
    """A function of other nodes. Each node gives the sort of value that the function takes."""

    function: Function
    below: tuple[ExpressionNode, ...] = ()

    @property
    def gives(self) -> Sort:
        return self.function.gives

    def cpp(self, state: str) -> str:
        return f"{self.function.cpp}({','.join(node.cpp(state) for node in self.below)})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return self.function.numpy(*(node.evaluate(dtype, values) for node in self.below))


@dataclass(frozen=True)
class AsNumber(ExpressionNode):
    """The number of a truth value: 1 or 0."""

    truth: ExpressionNode

    @property
    def below(self) -> tuple[ExpressionNode, ...]:
        return (self.truth,)

    def cpp(self, state: str) -> str:
        return f"fn::number<{state}>({self.truth.cpp(state)})"

    def evaluate(self, dtype: np.dtype[Any], values: Values) -> Any:
        return self.truth.evaluate(dtype, values).astype(dtype)


def elements_of(node: ExpressionNode) -> list[Element]:
    """Return the elements of arrays that an expression uses."""
    return [each for each in node.walk() if isinstance(each, Element)]


def is_index(node: ExpressionNode) -> bool:
    """Return whether `bounds` knows all parts of a node."""
    if isinstance(node, Apply):
        return node.function.label in ("+", "-", "*", "//", "%") and all(map(is_index, node.below))
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
        low, high = _bounds_of(node.function.label, [bounds(each, ranges) for each in node.below])
    if low < -_LARGEST or high > _LARGEST:
        raise OverflowError
    return low, high


def _bounds_of(label: str, operands: list[Range]) -> Range:
    if len(operands) == 1:
        return -operands[0][1], -operands[0][0]
    (low, high), (low_of_other, high_of_other) = operands
    if label == "+":
        return low + low_of_other, high + high_of_other
    if label == "-":
        return low - high_of_other, high - low_of_other
    if label == "*":
        ends = [x * y for x in (low, high) for y in (low_of_other, high_of_other)]
    elif low_of_other <= 0:  # so that no quotient or rest is larger than these
        most = max(abs(each) for operand in operands for each in operand)
        return -most, most
    elif label == "//":
        ends = [x // y for x in (low, high) for y in (low_of_other, high_of_other)]
    else:
        within = low >= 0 and high < low_of_other
        return (low, high) if within else (0, high_of_other - 1)
    return min(ends), max(ends)
