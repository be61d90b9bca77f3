"""Elementwise: an epilogue that is an expression of each element of the result."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.epilogues.base import BoundEpilogue, Epilogue, Memory, host_array
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.expression import Element, Expression, Variable, bounds, parse
from mpicomm.expressions.functions import FUNCTIONS, kind_of
from mpicomm.kernels import epilogue
from mpicomm.kernels.reductions import blocks_for, cpp_name
from mpicomm.kernels.variant import Launch
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.types import is_narrow

_VALUE, _INDEX = Variable("v", "v"), Variable("i", "i", "integer")
_FLOAT32 = np.dtype(np.float32)
_BLOCK = 1 << 16  # the elements that NumPy computes at once, so that they stay in a core's cache


class Elementwise(Epilogue):
    """An expression that an all-reduce applies to each element of its result, before it stores the element.

    ``Elementwise("v * scale + bias[i % 512]", scale=0.5, bias=b)``: ``v`` is the element that the call would store
    without an epilogue, and ``i`` is its index. The other names are the keyword arguments, up to 8:

    - numbers, which take the kind of the elements: a float needs elements of floats;
    - arrays on the device of the result, outside its memory. Their elements take the type of the result's elements. The
      expression computes their index from i, integers and numbers with ``+ - * // %``. The index must be within the
      array for each i.

    The rest of an expression is as in `Op`. The computation is in the element type, for floats of 16 bits or fewer in
    float32. The result is rounded once, to the type of ``recvbuf``. This type may differ from the type of ``sendbuf``,
    but has the same kind or a later kind: bool, integers, floats, complex numbers.

    All ranks pass equal epilogues with equal operands, because the rank that reduces an element applies it. The
    constructor is local. The caller keeps arrays unchanged until the call is done. The constructor raises
    `InvalidUsageError` for another expression or operand. A call raises it for types without the expression.
    """

    def __init__(self, expression: str, /, **operands: Any) -> None:
        if len(operands) > epilogue.MOST_OPERANDS:
            raise InvalidUsageError(
                f"epilogue={expression!r} has {len(operands)} operands: pass up to {epilogue.MOST_OPERANDS}"
            )
        self.expression = expression
        self._numbers: dict[str, int | float] = {}
        self.arrays = {}
        for name, operand in operands.items():
            if name in ("v", "i") or name in FUNCTIONS:
                raise InvalidUsageError(
                    f"epilogue={expression!r}: the operand {name} has a name that means something else: rename it"
                )
            number = number_of(operand)
            if number is None:
                self.arrays[name] = operand
            else:
                self._numbers[name] = number
        # As text, because 0.0 and -0.0 are equal, and so are 1 and 1.0, but results differ.
        numbers = [(name, repr(number)) for name, number in self._numbers.items()]
        self.constants = expression, *numbers, *self.arrays

    def __repr__(self) -> str:
        operands = "".join(f", {name}={operand!r}" for name, operand in self._numbers.items())
        return f"Elementwise({self.expression!r}{operands}{''.join(f', {name}=...' for name in self.arrays)})"

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        assert result.dtype is not None
        arrays = {name: self.read(name, array, result) for name, array in self.arrays.items()}
        expression = self._parse(arrays)
        for name in (*self._numbers, *arrays):
            if name not in expression.names:
                raise InvalidUsageError(
                    f"{operation}: epilogue={self.expression!r} does not use the operand {name}: leave it out"
                )
        expression.require_defined(dtype.name)
        self.require_kind(operation, dtype, result)
        operands = "".join(f", {name}={number}" for name, number in self._numbers.items())
        operands += "".join(f", {name}={array.dtype}" for name, array in arrays.items())
        text = f"{expression.text!r}{operands}, to {result.dtype}"
        bound = BoundElementwise(text, dtype, result, expression, self._numbers, arrays)
        outside = bound.outside(result.total)
        if outside is not None:
            raise InvalidUsageError(f"{operation}: epilogue={expression.text!r}: {outside}")
        return bound

    def _parse(self, arrays: dict[str, Operand]) -> Expression:
        numbers, named = [], []
        for place, (name, number) in enumerate(self._numbers.items()):
            whole = isinstance(number, int)
            code = f"w.{'integer' if whole else 'real'}({place})"
            numbers.append(Variable(name, code, "integer" if whole else "float"))
        for place, (name, array) in enumerate(arrays.items(), len(numbers)):
            assert array.dtype is not None
            code = f"w.array<dtype::{cpp_name(array.dtype.name)}>({place})"
            named.append(Variable(name, code, kind_of(array.dtype.name)))
        whole_numbers = [number for number in numbers if number.kind == "integer"]
        return parse(self.expression, (_VALUE, _INDEX, *numbers), "epilogue", tuple(named), (_INDEX, *whole_numbers))


class ToFp8(Elementwise):
    """Multiplies by ``scale`` and converts to fp8, with saturation, as `mpicomm.epilogues.fp8` says."""

    def __init__(self, scale: Any, dtype: str) -> None:
        largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype)
        if largest is None:
            raise InvalidUsageError(f"dtype={dtype!r} is no fp8 type: use float8_e4m3fn or float8_e5m2")
        factor = "scale[0]" if number_of(scale) is None else "scale"
        super().__init__(f"max(min(v * {factor}, {largest}), -{largest})", scale=scale)
        self._dtype = dtype

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        assert result.dtype is not None
        if result.dtype.name != self._dtype:
            raise InvalidUsageError(
                f"{operation}: epilogue=fp8(..., dtype={self._dtype!r}): {result.name} has {result.dtype}: pass one of "
                f"{self._dtype}, or another dtype to fp8"
            )
        return super().bind(operation, dtype, result)


class BoundElementwise(BoundEpilogue):
    """An expression for the types and buffers of a call. ``numbers`` and ``arrays`` are its operands by name."""

    def __init__(
        self,
        text: str,
        dtype: np.dtype[Any],
        result: Operand,
        expression: Expression,
        numbers: Mapping[str, int | float],
        arrays: Mapping[str, Operand],
    ) -> None:
        super().__init__(text, dtype, result, arrays)
        self._expression = expression
        self._numbers = numbers
        packed = (struct.pack("<d" if isinstance(each, float) else "<q", each) for each in numbers.values())
        self._operands = epilogue.EpilogueOperands(tuple(struct.unpack("<Q", word)[0] for word in packed))
        self.rebind(result.pointer, result.total, [(array.pointer, array.total) for array in arrays.values()])

    def rebind(self, output: int, count: int, arrays: Sequence[Memory]) -> bool:
        self.output, self._operands.count = output, count
        for place, (pointer, _) in enumerate(arrays, len(self._numbers)):
            self._operands.words[place] = pointer
        return self.outside(count) is None

    def outside(self, count: int) -> str | None:
        """Return why an index is outside its array for one of ``count`` elements; None if each is within."""
        ranges = {name: (number, number) for name, number in self._numbers.items() if isinstance(number, int)}
        ranges["i"] = (0, count - 1)
        for element in self._expression.tree.walk() if count else ():
            if not isinstance(element, Element):
                continue
            name, size = element.array.name, self._arrays[element.array.name].total
            try:
                least, largest = bounds(element.index, ranges)
            except OverflowError:
                return f"the index of {name} may need more than 64 bits: use smaller numbers"
            if least < 0 or largest >= size:
                return (
                    f"{name} has {size} elements, and its index goes from {least} to {largest} for {count} elements: "
                    f"pass more, or use i % {size}"
                )
        return None

    def fused(self, reduced: int, shards: int = 1) -> tuple[tuple[str, ...], epilogue.PacketEpilogue]:
        options = epilogue.epilogue_options(self._code, self.result.name if self.converts else None)
        return options, epilogue.PacketEpilogue(self._operands, reduced, self.output)

    def separate_launch(self, source: int, failed: int, multiprocessors: int) -> Launch:
        arguments = epilogue.EpilogueArguments(source, self.output, failed, self._operands)
        nbytes = self._operands.count * max(self.dtype.itemsize, self.result.itemsize)
        variant = epilogue.epilogue_kernel(self.dtype.name, self.result.name, self._code)
        return Launch(variant, arguments, blocks_for(nbytes, multiprocessors), epilogue.EPILOGUE_THREADS)

    @cached_property
    def _code(self) -> str:  # not at once, because calls on the host bind each time
        return self._expression.tree.cpp("State")

    def apply_on_host(self, reduced: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        wide = _FLOAT32 if is_narrow(self.dtype) else self.dtype
        values: dict[str, Any] = {
            name: np.float64(number) if isinstance(number, float) else np.int64(number)
            for name, number in self._numbers.items()
        }
        values |= {name: host_array(array) for name, array in self._arrays.items()}
        with np.errstate(all="ignore"):
            for start in range(0, reduced.size, _BLOCK):
                part = reduced[start : start + _BLOCK]
                values["v"] = part.astype(wide)
                values["i"] = np.arange(start, start + part.size, dtype=np.int64)
                made = np.asarray(self._expression.tree.evaluate(wide, values))
                if is_narrow(self.result):
                    made = _rounded_to_odd(made)  # NumPy rounds only a float32 once
                np.copyto(out[start : start + _BLOCK], made, casting="unsafe")


def number_of(operand: Any) -> int | float | None:
    """Return an operand that is a number, or None for an array. Raises `InvalidUsageError` beyond 64 bits."""
    if isinstance(operand, (np.integer, np.floating, np.bool_)):
        operand = operand.item()
    if isinstance(operand, int) and not -(2**63) <= operand < 2**63:
        raise InvalidUsageError(f"the operand {operand} of an epilogue has more than 64 bits: pass a float")
    if isinstance(operand, (bool, int)):
        return int(operand)
    return operand if isinstance(operand, float) else None


def _rounded_to_odd(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Return numbers as float32 that may be rounded once more, to fewer bits: see expressions.cuh."""
    if values.dtype == _FLOAT32:
        return values
    if values.dtype.kind in "biu":
        negative, magnitudes = values < 0, values.astype(np.uint64)
        magnitudes = np.where(negative, -magnitudes, magnitudes)
        cut = (magnitudes >> 11 | (magnitudes & 0x7FF != 0)) << 11  # to odd, as float64
        exact = np.where(magnitudes >> 53 != 0, cut, magnitudes).astype(np.float64)
        values = np.where(negative, -exact, exact)
    nearest = values.astype(_FLOAT32)
    bits = nearest.view(np.uint32)
    inexact, beyond = nearest != values, np.abs(nearest) > np.abs(values)
    odd: npt.NDArray[np.float32] = ((bits - beyond) | inexact).view(np.float32)
    return odd
