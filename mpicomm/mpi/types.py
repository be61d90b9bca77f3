"""Element types: what NumPy, MPI and the engines call them, and which of them each knows.

An element type is a ``numpy.dtype`` throughout. ``V1`` (NumPy's void of one byte) stands for ``MPI.BYTE``: bytes that
can be moved and combined bit by bit, and are no number.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError

BYTE = np.dtype("V1")

COVERED = (
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)
"""Names of the element types that the engines reduce and move as they are."""

_NOT_NUMPYS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # the package ml_dtypes adds them to NumPy

_covered = {np.dtype(name) for name in COVERED if name not in _NOT_NUMPYS}
_plain = _covered | {np.dtype(code) for code in ("g", "G", "S1", "U1")}


def is_covered(dtype: np.dtype[Any]) -> bool:
    """Whether the engines reduce and move this type as it is."""
    return dtype in _covered or _learn(dtype)


_NARROW = {"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"}


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Whether ``dtype`` is a float that reductions accumulate in float32."""
    return dtype.name in _NARROW


def is_plain(dtype: np.dtype[Any] | None) -> bool:
    """Whether an array of this type says by itself what its elements are, as mpi4py and mpicomm see it."""
    return dtype in _plain or (dtype is not None and _learn(dtype))


def _learn(dtype: np.dtype[Any]) -> bool:
    """Recognise a type of ml_dtypes; nothing has to be imported, for who has such a dtype has the package."""
    # The name alone would also be that of a structured type somebody named so.
    known = dtype.isbuiltin == 2 and dtype.isnative and dtype.name in _NOT_NUMPYS
    if known:
        _covered.add(dtype)
        _plain.add(dtype)
    return known


def covered_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in `COVERED`. Raises `InvalidUsageError` where ml_dtypes is needed and not there."""
    if name not in _NOT_NUMPYS:
        return np.dtype(name)
    try:
        # Not imported with this module: few programs need it.
        dtype: np.dtype[Any] = np.dtype(getattr(importlib.import_module("ml_dtypes"), name))
    except ImportError as error:
        raise InvalidUsageError(
            f"NumPy knows {name} with the package ml_dtypes alone: pip install ml_dtypes"
        ) from error
    _learn(dtype)
    return dtype


_TORCH_NAMES = {"half": "float16", "float": "float32", "double": "float64", "cfloat": "complex64"}
_torch: dict[Any, np.dtype[Any] | None] = {}


def torch_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return a ``torch.dtype`` as NumPy's; None where there is none. Raises as `covered_dtype`."""
    try:
        return _torch[dtype]
    except KeyError:
        pass
    name = str(dtype).removeprefix("torch.")
    name = _TORCH_NAMES.get(name, name)
    return _torch.setdefault(dtype, covered_dtype(name) if name in COVERED else None)


def interface_dtype(typestr: str, array: Any) -> np.dtype[Any] | None:
    """Return the type of a ``__cuda_array_interface__``; None for one that NumPy does not know.

    A type of ml_dtypes has a ``typestr`` that could be anything of its size ("<V2"): the array's own ``dtype`` tells.
    """
    own = getattr(array, "dtype", None)
    if isinstance(own, np.dtype) and own.str == typestr and is_plain(own):
        return own
    try:
        return np.dtype(typestr)
    except TypeError:
        return None


_from_mpi: dict[int, np.dtype[Any] | None] = {}  # by handle, of predefined types alone: others are freed and used again
_NO_NUMBERS = (MPI.PACKED, MPI.LOGICAL)  # mpi4py calls them uint8 and int32; MPI's reductions do not


def numpy_dtype(datatype: MPI.Datatype) -> np.dtype[Any] | None:
    """Return what one element of an MPI datatype is, None where it is more than one plain NumPy element.

    That is: of a predefined type or a duplicate of one. Derived types, the pairs of MINLOC and MAXLOC, ``MPI.PACKED``
    and Fortran's logicals are for MPI alone.
    """
    handle = datatype.handle
    if handle in _from_mpi:
        return _from_mpi[handle]
    if datatype == MPI.DATATYPE_NULL:
        return None
    if datatype.is_predefined:
        return _from_mpi.setdefault(handle, _predefined(datatype))
    if datatype.combiner != MPI.COMBINER_DUP:
        return None
    base, _, _ = datatype.decode()
    try:
        return numpy_dtype(base)
    finally:
        if not base.is_predefined:
            base.Free()


def _predefined(datatype: MPI.Datatype) -> np.dtype[Any] | None:
    if datatype == MPI.BYTE:
        return BYTE
    if datatype in _NO_NUMBERS:
        return None
    try:
        dtype = np.dtype(datatype.typestr)
    except TypeError:
        return None
    # The second half: a type whose number of bytes MPI knows and NumPy has no equal for, REAL16 in some builds.
    return dtype if dtype in _plain and dtype.itemsize == datatype.extent else None


_to_mpi: dict[np.dtype[Any], MPI.Datatype | None] = {BYTE: MPI.BYTE}


def mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """Return the predefined MPI datatype of an element type, None where this MPI has none (bfloat16, often float16)."""
    try:
        return _to_mpi[dtype]
    except KeyError:
        return _to_mpi.setdefault(dtype, _find_mpi_datatype(dtype))


def _find_mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    # NumPy's own alone: the char of bfloat16 is "E", which MPI libraries that have it take for a complex of two halves.
    if dtype.isbuiltin == 2 or not is_plain(dtype):
        return None
    try:
        return MPI.Datatype.fromcode(dtype.char)
    except ValueError:
        return None


def from_code(code: str) -> tuple[np.dtype[Any] | None, MPI.Datatype | None]:
    """Return what one of mpi4py's typecodes stands for, or a name in `COVERED`, as MPI need not know that type.

    The first is None for what is no plain NumPy element, the second where MPI knows no such type. Raises `ValueError`.
    """
    try:
        datatype = MPI.Datatype.fromcode(code)
    except ValueError:
        if code in ("e", "f2"):
            return np.dtype(np.float16), None
        if code in COVERED:
            return covered_dtype(code), None
        raise
    return numpy_dtype(datatype), datatype


_WORDS = tuple(np.dtype(f"uint{bits}") for bits in (64, 32, 16, 8))
_movement: dict[np.dtype[Any], tuple[np.dtype[Any], int]] = {}


def movement(dtype: np.dtype[Any]) -> tuple[np.dtype[Any], int]:
    """Return a covered type to move elements as, and how many of those make one element."""
    try:
        return _movement[dtype]
    except KeyError:
        pass
    if is_covered(dtype):
        return _movement.setdefault(dtype, (dtype, 1))
    fitting = (word for word in _WORDS if dtype.itemsize % word.itemsize == 0 and dtype.alignment >= word.alignment)
    word = next(fitting)
    return _movement.setdefault(dtype, (word, dtype.itemsize // word.itemsize))
