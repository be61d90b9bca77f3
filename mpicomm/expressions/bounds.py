"""Bounds of an index: the least and the largest element that an expression reaches."""

from __future__ import annotations

from collections.abc import Mapping

from mpicomm.expressions.tree import Apply, Element, ExpressionNode, Number, Variable

_LARGEST = 2**63 - 1
Range = tuple[int, int]
"""The least and the largest value."""


def is_index(node: ExpressionNode) -> bool:
    """Return whether `bounds` knows all parts of a node."""
    if isinstance(node, Apply):
        return node.function.label in ("+", "-", "*", "//", "%") and all(map(is_index, node.arguments))
    return isinstance(node, Variable) or (isinstance(node, Number) and isinstance(node.value, int))


def bounds(node: ExpressionNode, values: Mapping[str, Range]) -> Range:
    """Return bounds of an index. ``values`` has the range of each name; each value in a range may occur or not.

    Raises OverflowError if a part of the index may need more than 64 bits, because it would wrap there.
    """
    low, high = _bounds(node, values)
    if low < -_LARGEST or high > _LARGEST:
        raise OverflowError
    return low, high


def _bounds(node: ExpressionNode, values: Mapping[str, Range]) -> Range:
    if isinstance(node, Variable):
        return values[node.name]
    if isinstance(node, Number):
        return int(node.value), int(node.value)
    assert isinstance(node, Apply)
    operands = [bounds(argument, values) for argument in node.arguments]
    if len(operands) == 1:
        return -operands[0][1], -operands[0][0]
    (low, high), (low_of_other, high_of_other) = operands
    label = node.function.label
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


def indices(node: ExpressionNode) -> list[Element]:
    """Return the elements of arrays that an expression uses."""
    return [each for each in node.walk() if isinstance(each, Element)]
