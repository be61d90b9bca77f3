"""Element types: their names in NumPy, MPI and the engines, and the types that each of the three knows.

An element type is always a ``numpy.dtype``. ``V1``, NumPy's void of one byte, stands for ``MPI.BYTE``: bytes that can
be moved and combined bit by bit, but are no numbers.
"""

from __future__ import annotations

import importlib
from contextlib import suppress
from functools import lru_cache
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
"""Names of the element types that the engines reduce and move without conversion."""

_NOT_NUMPYS = ("bfloat16", "float8_e4m3fn", "float8_e5m2")  # the package ml_dtypes adds them to NumPy

_numpys = {np.dtype(name) for name in COVERED if name not in _NOT_NUMPYS}
_others = {np.dtype(code) for code in ("g", "G", "S1", "U1")}


@lru_cache  # NumPy takes some microseconds for a name
def is_covered(dtype: np.dtype[Any]) -> bool:
    """Return whether the engines reduce and move this type without conversion."""
    # The name is not enough, because a structured type may have the same name.
    return dtype in _numpys or (dtype.isbuiltin == 2 and dtype.isnative and dtype.name in _NOT_NUMPYS)


_NARROW = {"float16", *_NOT_NUMPYS}


@lru_cache
def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether ``dtype`` is a float that reductions accumulate in float32."""
    return dtype.name in _NARROW


def is_plain(dtype: np.dtype[Any] | None) -> bool:
    """Return whether a buffer of this type needs no datatype, because the type itself names the elements."""
    return dtype is not None and (dtype in _others or is_covered(dtype))


def covered_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of a name in `COVERED`. Raises `InvalidUsageError` if it needs ml_dtypes, which is missing."""
    if name not in _NOT_NUMPYS:
        return np.dtype(name)
    try:
        added: Any = importlib.import_module("ml_dtypes")  # not above, because few programs need the package
    except ImportError as error:
        raise InvalidUsageError(f"NumPy knows {name} only with the package ml_dtypes: pip install ml_dtypes") from error
    dtype: np.dtype[Any] = np.dtype(getattr(added, name))
    return dtype


@lru_cache
def torch_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return a ``torch.dtype`` as a NumPy dtype, or None if NumPy has none. Raises the errors of `covered_dtype`."""
    name = name_of(dtype)
    return covered_dtype(name) if name in COVERED else None


@lru_cache
def name_of(dtype: Any) -> str:
    """Return the name of an element type of NumPy or PyTorch, as NumPy or ml_dtypes names it."""
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def named_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype that a caller names, as a dtype of NumPy or PyTorch or by its name; None if it is not covered.

    Raises the errors of `covered_dtype`.
    """
    text = str(dtype)
    if text in COVERED or text.startswith("torch."):
        return torch_dtype(dtype)
    try:
        found = np.dtype(dtype)
    except TypeError:
        return None
    return found if is_covered(found) else None


def interface_dtype(typestr: str, array: Any) -> np.dtype[Any] | None:
    """Return the type of a ``__cuda_array_interface__``, or None for a type that NumPy does not know.

    The ``typestr`` of a type of ml_dtypes ("<V2") gives only its size, so the ``dtype`` of the array decides.
    """
    own = getattr(array, "dtype", None)
    if isinstance(own, np.dtype) and own.str == typestr and is_plain(own):
        return own
    try:
        return np.dtype(typestr)
    except TypeError:
        return None


_from_mpi: dict[int, np.dtype[Any] | None] = {}  # by handle; only predefined types, because MPI reuses other handles
# mpi4py takes these types for integers, but MPI's reductions do not. MPICH has only the first two.
_NO_NUMBERS = (MPI.PACKED, MPI.LOGICAL, MPI.LOGICAL1, MPI.LOGICAL2, MPI.LOGICAL4, MPI.LOGICAL8, MPI.LOGICAL16)


def numpy_dtype(datatype: MPI.Datatype) -> np.dtype[Any] | None:
    """Return the dtype of a predefined MPI datatype or of a duplicate of it, or None for all others.

    Only MPI handles derived types, the pairs of MINLOC and MAXLOC, ``MPI.PACKED`` and Fortran's logicals.
    """
    handle = datatype.handle
    if handle in _from_mpi:
        return _from_mpi[handle]
    if datatype == MPI.DATATYPE_NULL:
        return None
    if datatype.is_predefined:
        dtype = BYTE if datatype == MPI.BYTE else None
        if datatype == MPI.BFLOAT16_T:  # mpi4py has no code for it
            with suppress(InvalidUsageError):
                dtype = covered_dtype("bfloat16")
        elif dtype is None and datatype not in _NO_NUMBERS:
            with suppress(TypeError):
                dtype = np.dtype(datatype.typestr)
            # The sizes differ for a type that NumPy lacks, such as REAL16 in some builds of MPI.
            if dtype is None or not is_plain(dtype) or dtype.itemsize != datatype.extent:
                dtype = None
        return _from_mpi.setdefault(handle, dtype)
    if datatype.combiner != MPI.COMBINER_DUP:
        return None
    base, _, _ = datatype.decode()
    try:
        return numpy_dtype(base)
    finally:
        if not base.is_predefined:
            base.Free()


@lru_cache
def mpi_datatype(dtype: np.dtype[Any]) -> MPI.Datatype | None:
    """Return the predefined MPI datatype of an element type, or None if MPI has none (bfloat16, often float16)."""
    if dtype == BYTE:
        return MPI.BYTE
    # Types that a package has added to NumPy have none. The char of bfloat16 is "E", which some MPI libraries take for
    # a complex number of two halves.
    if dtype.isbuiltin != 2 and is_plain(dtype):
        with suppress(ValueError):
            return MPI.Datatype.fromcode(dtype.char)
    return None


def from_code(code: str) -> tuple[np.dtype[Any] | None, MPI.Datatype | None]:
    """Return the dtype and the MPI datatype of one of mpi4py's typecodes or of a name in `COVERED`.

    The dtype is None if no plain NumPy type fits. The datatype is None if MPI lacks the type. Raises `ValueError` for
    an unknown code.
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
