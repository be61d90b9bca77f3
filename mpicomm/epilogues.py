"""Epilogues: what an all-reduce does to its result before it stores it. ``import mpicomm.epilogues`` for its makers."""

from __future__ import annotations

import keyword
import struct
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpicomm.devices.host import array_at
from mpicomm.errors import InvalidUsageError
from mpicomm.expressions.bounds import bounds, indices
from mpicomm.expressions.expression import Expression, parse
from mpicomm.expressions.functions import FUNCTIONS, KINDS, kind_of
from mpicomm.expressions.tree import Array, Variable
from mpicomm.kernels.epilogue import MOST_OPERANDS, EpilogueOperands
from mpicomm.kernels.reductions import cpp_name
from mpicomm.mpi.arguments import Operand
from mpicomm.mpi.arguments import parse as parse_buffer
from mpicomm.mpi.overlap import overlaps
from mpicomm.mpi.types import is_covered, is_narrow

_VALUE, _INDEX = Variable("v", "v"), Variable("i", "i", "integer")
_FLOAT32 = np.dtype(np.float32)
_BLOCK = 1 << 16  # elements that NumPy computes at once, which stay in a core's cache


class Epilogue:
    """An expression that is applied to each element of the result of an all-reduce, before it is stored.

    ``Epilogue("v * scale + bias[i % 512]", scale=0.5, bias=b)``: ``v`` is the element as the call would store it
    without an epilogue, ``i`` its index, and the other names are the keyword arguments, up to 8:

    - numbers, which take the kind of the elements: a float needs elements of floats;
    - arrays on the same device as the result, apart from it, whose elements take the type of the elements. Their index
      is computed of i, integers and numbers with ``+ - * // %``, and has to be within the array for each i.

    The rest of an expression is that of `Op`. It is computed in the element type, floats of 16 bits or fewer in
    float32, and rounded to the type of ``recvbuf``. That may be another than the type of ``sendbuf``, of the same kind
    or a later one: bool, integers, floats, complex numbers.

    All ranks pass equal epilogues with equal operands, because the rank that reduces an element applies it. Local; the
    caller keeps arrays unchanged until the call is done. Raises `InvalidUsageError` for an expression or operand that
    is none of these, here or when a call tells the types.
    """

    def __init__(self, expression: str, /, **operands: Any) -> None:
        if len(operands) > MOST_OPERANDS:
            raise InvalidUsageError(f"epilogue={expression!r} has {len(operands)} operands: pass up to {MOST_OPERANDS}")
        self.expression = expression
        self._numbers: dict[str, int | float] = {}
        self._arrays: dict[str, Any] = {}
        for name, operand in operands.items():
            if name in ("v", "i") or name in FUNCTIONS or keyword.iskeyword(name):
                raise InvalidUsageError(f"epilogue={expression!r}: the operand {name} has a name of its own meaning")
            number = _number(operand)
            if number is None:
                self._arrays[name] = operand
            else:
                self._numbers[name] = number

    def __repr__(self) -> str:
        operands = "".join(f", {name}={operand!r}" for name, operand in self._numbers.items())
        return f"Epilogue({self.expression!r}{operands}{''.join(f', {name}=...' for name in self._arrays)})"

    def key(self, identity_of: Callable[[Any], Hashable]) -> Hashable:
        """Return a key that is equal for equal epilogues; None where an array cannot be recognised."""
        arrays = [(name, identity_of(array)) for name, array in self._arrays.items()]
        if any(identity is None for _, identity in arrays):
            return None
        numbers = [(name, type(number), number) for name, number in self._numbers.items()]
        return self.expression, *numbers, *arrays

    def bind(self, operation: str, dtype: np.dtype[Any], result: Operand) -> BoundEpilogue:
        """Return it for a call whose elements of ``dtype`` become those of ``result``; raises `InvalidUsageError`."""
        assert result.dtype is not None
        arrays = {name: self._read(name, array, result) for name, array in self._arrays.items()}
        expression = self._parse(arrays)
        expression.require_defined(dtype.name)
        kinds = [kind_of(each.name) for each in (dtype, result.dtype)]
        if None in kinds or KINDS.index(kinds[1] or "bool") < KINDS.index(kinds[0] or "bool"):
            raise InvalidUsageError(
                f"{operation}: epilogue={self.expression!r}: recvbuf has {result.dtype} for results of {dtype}: pass "
                f"one of {kinds[0]}"
            )
        self._require_within(operation, expression, arrays, result.total)
        operands = EpilogueOperands(first=0, count=result.total)
        for place, name in enumerate((*self._numbers, *arrays)):
            number = self._numbers.get(name)
            operands.words[place] = arrays[name].pointer if number is None else _word(number)
        said = "".join(f", {name}={number}" for name, number in self._numbers.items())
        said += "".join(f", {name}={array.dtype}" for name, array in arrays.items())
        return BoundEpilogue(
            f"{expression.text!r}{said}, to {result.dtype}",
            expression,
            dtype,
            result.dtype,
            operands,
            dict(self._numbers),
            arrays,
        )

    def _read(self, name: str, array: Any, result: Operand) -> Operand:
        try:
            operand = parse_buffer(array, writable=False, name=name)
        except (TypeError, InvalidUsageError) as error:
            raise type(error)(f"epilogue={self.expression!r}: {name} is no number and no array: {error}") from error
        if operand.dtype is None or not is_covered(operand.dtype) or kind_of(operand.dtype.name) is None:
            raise InvalidUsageError(
                f"epilogue={self.expression!r}: {name} has no elements that are numbers: convert it"
            )
        if operand.on_device != result.on_device or operand.device != result.device:
            raise InvalidUsageError(
                f"epilogue={self.expression!r}: {name} is not on the device of {result.name}: move it there"
            )
        if overlaps(operand, result):
            raise InvalidUsageError(f"epilogue={self.expression!r}: {name} overlaps {result.name}: copy one of them")
        return operand

    def _parse(self, arrays: dict[str, Operand]) -> Expression:
        numbers, named = [], []
        for place, (name, number) in enumerate(self._numbers.items()):
            whole = isinstance(number, int)
            code = f"w.{'integer' if whole else 'real'}({place})"
            numbers.append(Variable(name, code, "integer" if whole else "float"))
        for place, (name, array) in enumerate(arrays.items(), len(numbers)):
            assert array.dtype is not None
            code = f"w.array<dtype::{cpp_name(array.dtype.name)}>({place})"
            named.append(Array(name, code, array.dtype.name))
        whole_numbers = [number for number in numbers if number.kind == "integer"]
        return parse(self.expression, (_VALUE, _INDEX, *numbers), "epilogue", tuple(named), (_INDEX, *whole_numbers))

    def _require_within(self, operation: str, expression: Expression, arrays: dict[str, Operand], count: int) -> None:
        ranges = {name: (int(number), int(number)) for name, number in self._numbers.items()}
        ranges["i"] = (0, count - 1)
        for element in indices(expression.tree) if count else ():
            least, largest = bounds(element.index, ranges)
            size = arrays[element.array.name].total
            if least < 0 or largest >= size:
                raise InvalidUsageError(
                    f"{operation}: epilogue={self.expression!r}: {element.array.name} has {size} elements, and its "
                    f"index goes from {least} to {largest} for {count} elements: pass more, or use i % {size}"
                )


@dataclass(frozen=True)
class BoundEpilogue:
    """An epilogue for the types and buffers of a call."""

    text: str
    """It in words; ranks must agree in it."""
    expression: Expression
    dtype: np.dtype[Any]
    """The elements that are reduced."""
    result: np.dtype[Any]
    """The elements that are stored."""
    operands: EpilogueOperands
    """As kernels take them."""
    numbers: dict[str, int | float] = field(repr=False)
    arrays: dict[str, Operand] = field(repr=False)

    @property
    def converts(self) -> bool:
        """Whether the stored elements have another type than the reduced ones."""
        return self.result != self.dtype

    @property
    def code(self) -> str:
        """The expression in C++."""
        return self.expression.cpp("State")

    def on_host(self, reduced: np.ndarray[Any, Any], out: np.ndarray[Any, Any]) -> None:
        """Apply it to ``reduced``, which may be the same memory as ``out``; local."""
        wide = _FLOAT32 if is_narrow(self.dtype) else self.dtype
        values: dict[str, Any] = {
            name: np.float64(number) if isinstance(number, float) else np.int64(number)
            for name, number in self.numbers.items()
        }
        values |= {name: _host_array(array) for name, array in self.arrays.items()}
        with np.errstate(all="ignore"):
            for start in range(0, reduced.size, _BLOCK):
                part = reduced[start : start + _BLOCK]
                values["v"] = part.astype(wide)
                values["i"] = np.arange(start, start + part.size, dtype=np.int64)
                made = np.asarray(self.expression.evaluate(wide, values))
                if is_narrow(self.result):
                    made = made.astype(_FLOAT32)  # as kernels do it
                np.copyto(out[start : start + _BLOCK], made, casting="unsafe")


def fp8(scale: Any, dtype: str = "float8_e4m3fn") -> Epilogue:
    """Return the epilogue that multiplies by ``scale`` and converts to 8 bits, with saturation; NaN stays NaN. Local.

    ``scale`` is a number, or an array of one element on the device of the result, which may change from replay to
    replay of a CUDA graph. ``recvbuf`` has elements of ``dtype``: "float8_e4m3fn" or "float8_e5m2".
    """
    largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype)
    if largest is None:
        raise InvalidUsageError(f"dtype={dtype!r} is no float of 8 bits: use float8_e4m3fn or float8_e5m2")
    factor = "scale[0]" if _number(scale) is None else "scale"
    return Epilogue(f"max(min(v * {factor}, {largest}), -{largest})", scale=scale)


def as_epilogue(given: Any, operands: dict[str, Any]) -> Epilogue | None:
    """Return the argument ``epilogue`` of a call, with the call's other keyword arguments; None where it has none."""
    if given is None and not operands:
        return None
    if given is None:
        raise TypeError(f"{', '.join(operands)}: no argument of the call has this name, and there is no epilogue=")
    if isinstance(given, str):
        return Epilogue(given, **operands)
    if not isinstance(given, Epilogue):
        raise TypeError(f"epilogue={given!r} is no epilogue: pass an expression, or one of mpicomm.epilogues")
    if operands:
        raise TypeError(f"{', '.join(operands)}: operands are for an expression, and epilogue={given!r} has its own")
    return given


def _number(operand: Any) -> int | float | None:
    if isinstance(operand, (np.integer, np.floating, np.bool_)):
        operand = operand.item()
    if isinstance(operand, int) and not -(2**63) <= operand < 2**63:
        raise InvalidUsageError(f"the operand {operand} of an epilogue has more than 64 bits: pass a float")
    if isinstance(operand, (bool, int)):
        return int(operand)
    return operand if isinstance(operand, float) else None


def _word(number: int | float) -> int:
    return int(struct.unpack("<Q", struct.pack("<d" if isinstance(number, float) else "<q", number))[0])


def _host_array(array: Operand) -> np.ndarray[Any, Any]:
    assert array.dtype is not None
    return array_at(array.pointer, array.nbytes, np.dtype(np.uint8)).view(array.dtype)
