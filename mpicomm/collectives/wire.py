"""Wire: the argument ``wire_dtype`` of a collective. Floats travel as codes of 8 bits: see eight_bits.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.arguments import Operand

CODES = ("float8_e4m3fn", "int8")
"""The types of codes."""
ERRORS = {"float8_e4m3fn": 1 / 16, "int8": 1 / 127}
"""The most by which a code differs from its element, as a part of the largest magnitude in the block."""
CODED = ("float32", "float16", "bfloat16")
"""The types of elements that travel as codes."""
CODED_OPS = ("sum", "avg")


@dataclass(frozen=True)
class Wire:
    """Elements travel as codes of type ``codes``. In an all-reduce results do so, too, if ``again``."""

    codes: str
    again: bool = True

    def __str__(self) -> str:
        return self.codes if self.again else f"{self.codes}, None"

    @property
    def error(self) -> float:
        """The most by which the sum of an all-reduce differs, as a part of the largest magnitudes in its block."""
        one = ERRORS[self.codes]
        return one * (2 + one) if self.again else one

    def require(self, operation: str, dtype: np.dtype[Any] | None, op: str | None) -> None:
        """Raise `InvalidUsageError` for elements and operations that no codes can carry."""
        if dtype is None or dtype.name not in CODED:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for elements of {", ".join(CODED)}, and these are '
                f"{'elements that only MPI knows' if dtype is None else dtype}: leave it out, or convert the array"
            )
        if op is not None and op not in CODED_OPS:
            raise InvalidUsageError(
                f'{operation}: wire_dtype="{self}" is for SUM and AVG, and op is {op}: leave it out'
            )


def checked_wire(
    wire: Wire | None,
    operation: str,
    operands: Sequence[Operand],
    dtype: np.dtype[Any] | None,
    op: str | None,
    size: int,
    *,
    plain: bool,
) -> Wire | None:
    """Return how the elements of a call travel; None if they travel as they are. Raises `InvalidUsageError`.

    ``plain`` is whether the call has neither derived datatypes nor an epilogue.
    """
    if wire is None:
        return None
    wire.require(operation, dtype, op)
    if not plain or len({operand.dtype for operand in operands if operand.total}) > 1:
        kinds = " and ".join(str(operand.dtype) for operand in operands)
        raise InvalidUsageError(
            f'{operation}: wire_dtype="{wire}" is for two buffers of one element type, and goes with no derived '
            f"datatype and no epilogue; the buffers have {kinds}: convert one, or leave it out"
        )
    return wire if size > 1 else None  # one rank sends nothing


_KNOWN: dict[Any, Wire | None] = {None: None, **{codes: Wire(codes) for codes in CODES}}


def as_wire(given: Any) -> Wire | None:
    """Return the argument ``wire_dtype``; None without. Raises `InvalidUsageError`."""
    try:
        return _KNOWN[given]
    except (KeyError, TypeError):
        return _read(given)


def _read(given: Any) -> Wire:
    names = given if isinstance(given, tuple) else (given, given)
    if len(names) == 2:
        first, second = map(_name_of, names)
        if first in CODES and second in (first, None):
            return Wire(first, again=second is not None)
    raise InvalidUsageError(
        f'wire_dtype={given!r}: pass "float8_e4m3fn" or "int8", a pair such as ("int8", None) for results that travel '
        "as they are, or leave it out"
    )


def _name_of(given: Any) -> Any:
    if given is None or isinstance(given, str):
        return given
    try:
        return np.dtype(given).name
    except TypeError:
        return given
