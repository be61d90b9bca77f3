"""Datatypes that cannot be used with arrays in device memory, in all forms of an argument."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.mpi.arguments import Operand, parse
from mpicomm.mpi.spec import Shape
from tests.helpers.fakes.fake_driver import content


class DeviceBytes:
    """An array of bytes on a GPU."""

    def __init__(self, nbytes: int) -> None:
        self.memory = content(nbytes)
        data = (self.memory.ctypes.data, False)
        self.__cuda_array_interface__ = {"version": 3, "data": data, "shape": (nbytes,), "typestr": "|u1"}


Parse = Callable[[Any, int, MPI.Datatype], Operand]


def received(spec: Any, shape: Shape = "one", blocks: int = 1) -> Operand:
    return parse(spec, shape=shape, blocks=blocks, writable=True, name="recvbuf")


FORMS: dict[str, Parse] = {
    "plain": lambda array, count, datatype: received([array, count, datatype]),
    "vector": lambda array, count, datatype: received([array, [0, count], [0, 0], datatype], "vector", 2),
    "typed": lambda array, count, datatype: received([array, [0, count], [0, 0], [MPI.BYTE, datatype]], "typed", 2),
}
IN_ALL_FORMS = pytest.mark.parametrize("read", FORMS.values(), ids=FORMS)


@pytest.fixture
def column() -> Iterator[MPI.Datatype]:
    """The second column of 3 rows of 4 doubles."""
    datatype = MPI.DOUBLE.Create_subarray([3, 4], [3, 1], [0, 1])
    yield datatype
    datatype.Free()


@IN_ALL_FORMS
def test_elements_stay_in_the_array(read: Parse, column: MPI.Datatype) -> None:
    assert read(DeviceBytes(80), 1, column).derived is not None  # its last byte is the 80th
    for nbytes, count, end in ((79, 1, 80), (96, 2, 176), (0, 1, 80)):
        with pytest.raises(
            InvalidUsageError,
            match=rf"^recvbuf: {count} elements .* byte 8 to byte {end} of a buffer of {nbytes} bytes: pass a larger",
        ):
            read(DeviceBytes(nbytes), count, column)
    assert read(DeviceBytes(0), 0, column).derived is not None


@IN_ALL_FORMS
def test_elements_do_not_begin_before_the_array(read: Parse) -> None:
    backwards = MPI.DOUBLE.Create_hvector(2, 1, -8).Commit()
    with pytest.raises(InvalidUsageError, match=r"^recvbuf: 1 elements .* from byte -8 to byte 8 of a buffer of 96 "):
        read(DeviceBytes(96), 1, backwards)
    backwards.Free()


def test_displacements_keep_elements_in_the_array(column: MPI.Datatype) -> None:
    array = DeviceBytes(96)
    for displ, begin in ((-16, -8), (17, 25)):
        with pytest.raises(InvalidUsageError, match=f"^recvbuf: 1 elements .* from byte {begin} to byte {begin + 72}"):
            received([array, [1], [displ], [column]], "typed")
    for displ in (-1, 1):  # in extents
        with pytest.raises(InvalidUsageError, match=f"^recvbuf: 1 elements .* from byte {8 + 96 * displ} "):
            received([array, [1], [displ], column], "vector")
    with pytest.raises(InvalidUsageError, match=r"^recvbuf: 1 elements .* from byte 104 to byte 176"):
        received([array, (1, 1), column])


@IN_ALL_FORMS
def test_negative_counts_and_the_null_datatype(read: Parse, column: MPI.Datatype) -> None:
    with pytest.raises(InvalidUsageError, match=r"^recvbuf: count -2 is negative: pass 0 or more"):
        read(DeviceBytes(96), -2, column)
    with pytest.raises(InvalidUsageError, match=r"^recvbuf: the datatype .*is MPI.DATATYPE_NULL.*: pass another"):
        read(DeviceBytes(96), 1, MPI.DATATYPE_NULL)


def test_the_null_datatype_of_a_rank_that_gets_nothing(column: MPI.Datatype) -> None:
    found = received([DeviceBytes(96), [0, 1], [0, 0], [MPI.DATATYPE_NULL, column]], "typed", 2).derived
    assert found is not None and [block.layout.nbytes for block in found] == [0, 24]


@pytest.mark.parametrize("number", [0, 1, 3])
def test_each_rank_has_a_datatype(number: int, column: MPI.Datatype) -> None:
    for spec in ([DeviceBytes(96), [column] * number], [DeviceBytes(96), [1, 1], [0, 0], [column] * number]):
        with pytest.raises(InvalidUsageError, match=f"^recvbuf: {number} datatypes for 2 ranks: pass one for each"):
            received(spec, "typed", 2)


@pytest.mark.parametrize("wrong", [None, 3, ["d", "d"]])
def test_what_is_no_datatype(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"^recvbuf: .* no datatypes?: pass .*MPI.Datatype for each rank"):
        received([DeviceBytes(96), [1, 1], [0, 0], wrong], "typed", 2)
