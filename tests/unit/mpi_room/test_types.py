from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.util import dtlib

from mpicomm import InvalidUsageError
from mpicomm.mpi import types

ml_dtypes = pytest.importorskip("ml_dtypes")

DATATYPES = {
    name: datatype
    for name, datatype in vars(MPI).items()
    if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL
}
NOT_PLAIN = {
    name for name in DATATYPES if name.endswith("_INT") and not name.startswith(("SIGNED", "UNSIGNED", "F_"))
} | {
    *("TWOINT", "PACKED", "LOGICAL", "F_BOOL"),
    *("INTEGER16", "LOGICAL1", "LOGICAL2", "LOGICAL4", "LOGICAL8", "LOGICAL16"),
}


@pytest.mark.parametrize("name", sorted(DATATYPES))
def test_every_predefined_datatype(name: str) -> None:
    datatype = DATATYPES[name]
    dtype = types.numpy_dtype(datatype)
    if name in NOT_PLAIN or datatype.extent == 0:  # Open MPI has names of types that its build lacks
        assert dtype is None
    elif name == "BYTE":
        assert dtype == np.dtype("V1")
    else:
        assert dtype is not None
        assert dtype == dtlib.to_numpy_dtype(datatype) or dtype == np.dtype("U1")  # mpi4py's wide character has no size
        assert dtype.itemsize == datatype.extent
    assert types.numpy_dtype(datatype) is dtype


def test_derived_datatypes() -> None:
    assert types.numpy_dtype(MPI.DATATYPE_NULL) is None
    for derived in (MPI.INT.Create_contiguous(2), MPI.INT.Create_vector(2, 1, 2), MPI.INT.Create_resized(0, 8)):
        assert types.numpy_dtype(derived) is None
        assert types.numpy_dtype(derived.Dup()) is None
    for datatype in (MPI.FLOAT, MPI.BYTE, MPI.PACKED, MPI.FLOAT_INT):
        once = datatype.Dup()
        twice = once.Dup()
        assert types.numpy_dtype(twice) == types.numpy_dtype(once) == types.numpy_dtype(datatype)
        once.Free()
        twice.Free()
    for _ in range(50):  # MPI gives a freed handle out again, to another type
        for base, expected in ((MPI.FLOAT, np.dtype("f4")), (MPI.DOUBLE, np.dtype("f8"))):
            duplicate = base.Dup()
            assert types.numpy_dtype(duplicate) == expected
            duplicate.Free()


@pytest.mark.parametrize("code", [*"?bhilBHILfdgFDG", "S1", "U1"])
def test_datatype_of_a_dtype_equals_mpi4pys(code: str) -> None:
    dtype = np.dtype(code)
    datatype = types.mpi_datatype(dtype)
    expected = dtlib.from_numpy_dtype(dtype)
    try:
        assert datatype is not None and datatype.is_predefined
        assert datatype == expected.decode()[0]
        assert types.numpy_dtype(datatype) == dtype
    finally:
        expected.Free()
    assert types.mpi_datatype(dtype) is datatype


def test_second_64_bit_integer_of_c_has_a_datatype_of_its_size() -> None:
    for code in "qQ":
        datatype = types.mpi_datatype(np.dtype(code))
        assert datatype is not None and types.numpy_dtype(datatype) == np.dtype(code)


@pytest.mark.parametrize("code", [">f8", "M8[s]", "S3", "V4", "O", "i4,f4", "2i4"])
def test_dtypes_that_mpi4py_refuses_have_no_datatype(code: str) -> None:
    assert types.mpi_datatype(np.dtype(code)) is None
    assert not types.is_plain(np.dtype(code))
    assert not types.is_covered(np.dtype(code))


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_types_of_ml_dtypes(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert types.is_covered(dtype) and types.is_plain(dtype)
    assert types.covered_dtype(name) == dtype
    assert types.mpi_datatype(dtype) is None  # although bfloat16 has the char of a complex of two halves


@pytest.mark.parametrize("name", ["float8_e4m3", "float8_e4m3fnuz", "int4", "uint2"])
def test_other_types_of_ml_dtypes_are_not_covered(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name))
    assert not types.is_covered(dtype) and not types.is_plain(dtype)


def test_structured_dtype_that_borrows_a_name_is_not_covered() -> None:
    class bfloat(np.void):  # type: ignore[misc]  # noqa: N801
        pass

    dtype = np.dtype((bfloat, [("bits", "u2")]))
    assert dtype.name == "bfloat16"
    assert not types.is_covered(dtype)


@pytest.mark.parametrize("name", types.COVERED)
def test_covered_types_have_the_dtype_of_their_name(name: str) -> None:
    dtype = types.covered_dtype(name)
    assert dtype.name == name
    assert types.is_covered(dtype) and types.is_plain(dtype)


@pytest.mark.parametrize(
    ("code", "dtype", "datatype"),
    [
        *[("d", "f8", MPI.DOUBLE), ("i4", "i4", MPI.INT32_T), ("B", "u1", MPI.UNSIGNED_CHAR), ("?", "?", MPI.C_BOOL)],
        *[("S1", "S1", MPI.CHAR), ("c", "S1", MPI.CHAR), ("Zd", "c16", MPI.C_DOUBLE_COMPLEX), ("e", "f2", None)],
        *[("bfloat16", "bfloat16", None), ("float32", "f4", None)],
    ],
)
def test_typecodes(code: str, dtype: str, datatype: MPI.Datatype | None) -> None:
    found, named = types.from_code(code)
    assert found == np.dtype(dtype)
    assert named == datatype or (code == "e" and named is not None)  # some MPI libraries know halves


def test_unknown_typecode() -> None:
    with pytest.raises(ValueError, match="cannot map code 'nope'"):
        types.from_code("nope")


def test_interface_types() -> None:
    assert types.interface_dtype("<f4", None) == np.dtype("f4")
    assert types.interface_dtype("|b1", None) == np.dtype("?")
    assert types.interface_dtype("<f1", None) is None

    class Array:
        dtype: Any = np.dtype(ml_dtypes.float8_e5m2)

    assert types.interface_dtype("<f1", Array()) == Array.dtype
    assert types.interface_dtype("<f4", Array()) == np.dtype("f4")  # the interface is right if the two differ


def test_missing_package_is_named() -> None:
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from mpicomm.mpi import types\n"
        "try: types.covered_dtype('bfloat16')\n"
        "except types.InvalidUsageError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install ml_dtypes" in result.stdout
    assert issubclass(InvalidUsageError, ValueError)


def test_package_of_more_types_is_not_imported_unasked() -> None:
    code = "import sys, mpicomm.mpi.types; print('ml_dtypes' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "False\n"
