from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.util import dtlib

from mpicomm.mpi import types

ml_dtypes = pytest.importorskip("ml_dtypes")

DATATYPES = {
    name: datatype
    for name, datatype in vars(MPI).items()
    if isinstance(datatype, MPI.Datatype) and datatype != MPI.DATATYPE_NULL
}
NOT_PLAIN = {
    name for name in DATATYPES if name.endswith("_INT") and not name.startswith(("SIGNED", "UNSIGNED", "F_"))
} | {"TWOINT", "PACKED", "F_BOOL", "INTEGER16", "COMPLEX4", *(f"LOGICAL{nbytes}" for nbytes in ("", 1, 2, 4, 8, 16))}


@pytest.mark.parametrize("name", sorted(DATATYPES))
def test_every_predefined_datatype(name: str) -> None:
    datatype = DATATYPES[name]
    dtype = types.numpy_dtype(datatype)
    if name in NOT_PLAIN or datatype.extent == 0:  # Open MPI has names of types that its build lacks
        assert dtype is None
    elif name == "BYTE":
        assert dtype == np.dtype("V1")
    elif name == "BFLOAT16_T":
        assert dtype == np.dtype(ml_dtypes.bfloat16)
    else:
        assert dtype is not None
        assert dtype == dtlib.to_numpy_dtype(datatype) or dtype == np.dtype("U1")  # mpi4py's wide character has no size
        assert dtype.itemsize == datatype.extent
    assert types.numpy_dtype(datatype) is dtype


def test_derived_datatypes() -> None:
    assert types.numpy_dtype(MPI.DATATYPE_NULL) is None
    for derived in (MPI.INT.Create_contiguous(2), MPI.INT.Create_vector(2, 1, 2), MPI.INT.Create_resized(0, 8)):
        assert types.numpy_dtype(derived) is types.numpy_dtype(derived.Dup()) is None
    for datatype in (MPI.FLOAT, MPI.BYTE, MPI.PACKED, MPI.FLOAT_INT):
        assert types.numpy_dtype(datatype.Dup().Dup()) == types.numpy_dtype(datatype)
    for _ in range(50):  # MPI gives a freed handle out again, to another type
        for base, expected in ((MPI.FLOAT, np.dtype("f4")), (MPI.DOUBLE, np.dtype("f8"))):
            duplicate = base.Dup()
            assert types.numpy_dtype(duplicate) == expected
            duplicate.Free()


@pytest.mark.parametrize("code", [*"?bhilBHILfdgFDGqQ", "S1", "U1"])
def test_datatype_of_a_dtype_equals_mpi4pys(code: str) -> None:
    dtype = np.dtype(code)
    datatype = types.mpi_datatype(dtype)
    assert datatype is not None and datatype.is_predefined and types.mpi_datatype(dtype) is datatype
    assert types.numpy_dtype(datatype) == dtype
    if code not in "qQ":  # the second integer of 64 bits in C
        expected = dtlib.from_numpy_dtype(dtype)
        assert datatype == expected.decode()[0]
        expected.Free()


class Borrowed(np.void):  # type: ignore[misc]
    """A structured type with the name of another type."""


Borrowed.__name__ = "bfloat"


@pytest.mark.parametrize(
    "dtype",
    [
        *[">f8", "M8[s]", "S3", "V4", "O", "i4,f4", "2i4", (Borrowed, [("bits", "u2")])],
        *(getattr(ml_dtypes, name) for name in ("float8_e4m3", "float8_e4m3fnuz", "int4", "uint2")),
    ],
)
def test_dtypes_that_mpi4py_refuses_have_no_datatype(dtype: Any) -> None:
    dtype = np.dtype(dtype)
    assert types.mpi_datatype(dtype) is None
    assert not types.is_plain(dtype)
    assert not types.is_covered(dtype)


@pytest.mark.parametrize("name", types.COVERED)
def test_covered_types_have_the_dtype_of_their_name(name: str) -> None:
    dtype = types.covered_dtype(name)
    assert dtype.name == name
    assert types.is_covered(dtype) and types.is_plain(dtype)
    if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        assert dtype == getattr(ml_dtypes, name)
        assert types.mpi_datatype(dtype) is None  # although bfloat16 has the char of a complex of two halves


def test_interface_types() -> None:
    assert types.interface_dtype("<f4", None) == np.dtype("f4")
    assert types.interface_dtype("|b1", None) == np.dtype("?")
    assert types.interface_dtype("<f1", None) is None

    class Array:
        dtype: Any = np.dtype(ml_dtypes.float8_e5m2)

    assert types.interface_dtype("<f1", Array()) == Array.dtype
    assert types.interface_dtype("<f4", Array()) == np.dtype("f4")  # the interface is right if the two differ


def test_the_package_of_more_types_is_imported_at_need_and_named_if_it_is_missing() -> None:
    code = (
        "import sys\n"
        "from mpicomm.mpi import types\n"
        "assert 'ml_dtypes' not in sys.modules\n"
        "sys.modules['ml_dtypes'] = None\n"
        "try: types.covered_dtype('bfloat16')\n"
        "except types.InvalidUsageError as error: print(error)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install ml_dtypes" in result.stdout
