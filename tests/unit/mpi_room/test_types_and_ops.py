from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from mpi4py.util import dtlib

from mpicomm import InvalidUsageError, Op
from mpicomm.mpi import types
from mpicomm.mpi.ops import AVG, check_legal, op_name
from mpicomm.mpi.types import COVERED, covered_dtype

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


pytest.importorskip("ml_dtypes")

NAMES = ("sum", "prod", "max", "min", "land", "lor", "lxor", "band", "bor", "bxor")


def test_operations_of_mpi_have_names_unless_only_mpi_has_them() -> None:
    for name in NAMES:
        op = getattr(MPI, name.upper())
        assert op_name(op) == op_name(MPI.Op(op)) == name
    of_the_user = MPI.Op.Create(lambda *_: None, commute=True)
    for op in (MPI.MAXLOC, MPI.MINLOC, MPI.REPLACE, MPI.NO_OP, MPI.OP_NULL, of_the_user):
        assert op_name(op) is None
    of_the_user.Free()


@pytest.mark.parametrize("op", ["sum", None, 3, np.add])
def test_what_is_no_operation_is_a_type_error(op: Any) -> None:
    with pytest.raises(TypeError):
        MPI.COMM_SELF.Allreduce(np.zeros(1), np.zeros(1), op)
    with pytest.raises(
        TypeError, match=r"is no reduction operation: pass an MPI\.Op such as MPI\.SUM, mpicomm\.AVG, or an mpicomm\.Op"
    ):
        op_name(op)


def test_average() -> None:
    assert op_name(AVG) == "avg"
    assert repr(AVG) == "mpicomm.AVG"
    assert copy.deepcopy(AVG) is AVG and pickle.loads(pickle.dumps(AVG)) is AVG


def test_operation_of_an_expression() -> None:
    op = Op("( a )+b*2", name="axpy", commute=True)
    assert op_name(op) == op.expression == "a + b * 2"
    assert op.Is_commutative() and op.commute and not Op("a - b").Is_commutative()
    assert repr(op) == "mpicomm.Op('a + b * 2', name='axpy', commute=True)"
    assert Op("a + b * 2", name="axpy", commute=True) is op and Op("a + b * 2") is not op
    assert copy.deepcopy(op) is op and pickle.loads(pickle.dumps(op)) is op
    first, second = np.arange(4, dtype=np.int16), np.full(4, 5, np.int16)
    op.Reduce_local(first, second)
    assert second.tolist() == [10, 11, 12, 13]
    op.Free()
    with pytest.raises(InvalidUsageError, match=r"mpicomm\.Op\('a \+ b \* 2'.* was freed: make another"):
        op_name(op)
    assert Op("a + b * 2", name="axpy", commute=True) is not op


def test_mpi_holds_few_operations_of_expressions() -> None:
    made: list[Op] = []
    with pytest.raises(InvalidUsageError, match="call Free of operations that are not used"):
        while len(made) < 10_000:
            made.append(Op(f"a + {len(made)}"))
    for op in made:
        op.Free()
    for _ in range(2 * len(made)):  # there is place again for each that was freed
        Op("a + 0").Free()


INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
FLOATS = {"float16", "bfloat16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"}
COMPLEX = {"complex64", "complex128"}
LEGAL = {
    **dict.fromkeys(("sum", "prod"), INTEGERS | FLOATS | COMPLEX),
    **dict.fromkeys(("max", "min"), INTEGERS | FLOATS),
    **dict.fromkeys(("land", "lor", "lxor"), INTEGERS | {"bool"}),
    **dict.fromkeys(("band", "bor", "bxor"), INTEGERS),
    "avg": FLOATS | COMPLEX,
}


@pytest.mark.parametrize("dtype", COVERED)
@pytest.mark.parametrize("name", LEGAL)
def test_legal_pairs(name: str, dtype: str) -> None:
    for _ in range(2):  # once remembered too
        if dtype in LEGAL[name]:
            check_legal(name, covered_dtype(dtype))
        else:
            with pytest.raises(InvalidUsageError, match=f"op={name} is not defined for {dtype}, only for "):
                check_legal(name, covered_dtype(dtype))


def test_other_types() -> None:
    check_legal("bxor", np.dtype("V1"))
    for char in ("g", "S1", "U1"):
        check_legal("sum", np.dtype(char))  # MPI decides
    for name, char, said in (
        ("sum", "V1", r"op=sum is not defined for MPI\.BYTE, .* MPI\.BYTE: band, bor, bxor"),
        *(("avg", char, r"not defined for .*none, it can only be moved") for char in ("S1", "U1")),
        ("sum", "?", "integer, float, complex; defined for bool: land, lor, lxor"),
        ("avg", "i4", r"op=avg .*, complex; defined for int32: sum, prod, max, min, l"),
    ):
        with pytest.raises(InvalidUsageError, match=said):
            check_legal(name, np.dtype(char))


def test_arguments_of_an_operation_that_have_another_type() -> None:
    no_text, no_bool = "is no text: pass a name", "is no bool: pass True if"
    for name, value, said in (
        *(("name", value, no_text) for value in (3, None)),
        *(("commute", value, no_bool) for value in ("no", 1)),
    ):
        arguments: dict[str, Any] = {name: value}
        with pytest.raises(TypeError, match=f"^{name}={value!r} {said}"):
            Op("a + b", **arguments)
