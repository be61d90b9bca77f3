"""Reduction operations: their names, the element types for which they are defined, and the average, which MPI lacks."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.kernels.reductions import is_own, own_op
from mpicomm.mpi import types
from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.own_ops import Op


class Average(MPI.Op):
    """The type of `AVG`, an MPI.Op that MPI does not know, so MPI refuses it like ``MPI.OP_NULL``."""

    def __repr__(self) -> str:
        return "mpicomm.AVG"

    def __reduce__(self) -> str:
        return "AVG"  # copies and unpickled objects are the same object


AVG = Average()
"""``op=mpicomm.AVG``: the sum of all contributions divided by their number, for floats and complex numbers."""

_NAMES = {
    getattr(MPI, name).handle: name.lower()
    for name in ("SUM", "PROD", "MAX", "MIN", "LAND", "LOR", "LXOR", "BAND", "BOR", "BXOR")
}

_LOGICAL = ("land", "lor", "lxor")
# The kinds of elements for which the MPI standard defines each operation.
_LEGAL = {
    **dict.fromkeys(("sum", "prod"), ("integer", "float", "complex")),
    **dict.fromkeys(("max", "min"), ("integer", "float")),
    **dict.fromkeys(_LOGICAL, ("integer", "bool")),
    **dict.fromkeys(("band", "bor", "bxor"), ("integer", "byte")),
    "avg": ("float", "complex"),
}
_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}
_FORTRAN_INTEGERS = frozenset(
    getattr(MPI, name).handle for name in ("INTEGER", "INTEGER1", "INTEGER2", "INTEGER4", "INTEGER8", "INTEGER16")
) - {MPI.DATATYPE_NULL.handle}
"""Types for which MPI defines no logical operations, because Fortran has LOGICAL for them."""

_checked: set[tuple[str, np.dtype[Any]]] = set()


def op_name(op: MPI.Op) -> str | None:
    """Return the name of an operation that the engines know, or None for an operation that only MPI can carry out.

    The name is a word such as "sum", or the expression of an `Op`. Only MPI carries out MINLOC, MAXLOC, REPLACE, NO_OP
    and operations that ``MPI.Op.Create`` has made. Raises `TypeError` for an object that is no operation, and
    `RefusedByMpiError` for an `Op` that was freed.
    """
    if op is AVG:
        return "avg"
    if isinstance(op, Op):
        if op == MPI.OP_NULL:
            raise RefusedByMpiError(f"op={op!r} was freed: make another", MPI.ERR_OP)
        return op.expression
    if isinstance(op, MPI.Op):
        return _NAMES.get(op.handle)
    raise TypeError(
        f"op={op!r} is no reduction operation: pass an MPI.Op such as MPI.SUM, mpicomm.AVG, or an mpicomm.Op"
    )


def check_legal(name: str, dtype: np.dtype[Any], datatype: MPI.Datatype | None = None) -> None:
    """Raise unless the operation ``name`` is defined for the element type ``dtype``, the caller's ``datatype``.

    MPI itself decides on characters. Raises `RefusedByMpiError`, but `InvalidUsageError` for an expression.
    """
    if datatype is not None and name in _LOGICAL and datatype.handle in _FORTRAN_INTEGERS:
        raise RefusedByMpiError(
            f"op={name} is not defined for {datatype.name}: name the elements by a type of C, such as MPI.INT32_T",
            MPI.ERR_OP,
        )
    if (name, dtype) in _checked:
        return
    shown = "MPI.BYTE" if dtype == types.BYTE else str(dtype)
    if is_own(name):
        own_op(name).require_defined(shown)
        _checked.add((name, dtype))
        return
    kind = _kind(dtype)
    if kind in _LEGAL[name] or (dtype.kind in "SU" and name != "avg"):
        _checked.add((name, dtype))
        return
    legal = [other for other, kinds in _LEGAL.items() if kind in kinds]
    raise RefusedByMpiError(
        f"op={name} is not defined for {shown}, only for {_listed(_LEGAL[name])}; "
        f"defined for {shown}: {_listed(legal) if legal else 'none, it can only be moved'}",
        MPI.ERR_OP,
    )


def _kind(dtype: np.dtype[Any]) -> str | None:
    if dtype == types.BYTE:
        return "byte"
    if dtype.isbuiltin == 2:  # a type that a package has added to NumPy; the engines know only floats among these
        return "float" if types.is_covered(dtype) else None
    return _KINDS.get(dtype.kind)


def _listed(words: tuple[str, ...] | list[str]) -> str:
    return ", ".join(words)
