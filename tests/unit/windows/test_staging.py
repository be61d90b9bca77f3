"""Elements of derived datatypes in host memory, against MPI's own packing."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

from mpicomm.mpi.layout import layout_of
from mpicomm.windows.steps import gather_on_host, scatter_on_host

Bytes = npt.NDArray[np.uint8]
DATATYPES: dict[str, Callable[[], MPI.Datatype]] = {
    "a vector": lambda: MPI.INT.Create_vector(5, 2, 3),
    "backwards": lambda: MPI.SHORT.Create_hvector(4, 1, -6),
    "indexed blocks": lambda: MPI.DOUBLE.Create_indexed([2, 1, 3], [9, 0, 4]),
    "a structure": lambda: MPI.Datatype.Create_struct([1, 3, 2], [0, 8, 40], [MPI.CHAR, MPI.DOUBLE, MPI.INT]),
    "a block of a matrix": lambda: MPI.FLOAT.Create_subarray([6, 8], [3, 4], [2, 1]),
    "a pair with a gap": lambda: MPI.SHORT_INT.Dup(),
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", DATATYPES)
def test_elements_are_packed_and_unpacked_as_by_mpi(name: str, count: int) -> None:
    datatype = DATATYPES[name]().Commit()
    whole = datatype.Create_contiguous(count).Commit()
    layout = layout_of(datatype)
    assert layout is not None
    layout = layout.repeated(count)
    rng = np.random.default_rng(count)
    memory, other = (rng.integers(0, 256, 2048, np.uint8) for _ in range(2))
    start = 512  # elements may lie before the address of a buffer
    packed, expected = (np.zeros(layout.nbytes, np.uint8) for _ in range(2))
    gather_on_host(layout, memory.ctypes.data + start, packed.ctypes.data)
    _pack(whole, memory, start, expected)
    assert np.array_equal(packed, expected)
    changed = other.copy()
    scatter_on_host(layout, other.ctypes.data + start, packed.ctypes.data)
    _unpack(whole, changed, start, expected)
    assert np.array_equal(other, changed)
    whole.Free()
    datatype.Free()


def _pack(datatype: MPI.Datatype, memory: Bytes, start: int, packed: Bytes) -> None:
    MPI.COMM_SELF.Sendrecv([memory[start:], 1, datatype], 0, 0, [packed, packed.size, MPI.BYTE], 0, 0)


def _unpack(datatype: MPI.Datatype, memory: Bytes, start: int, packed: Bytes) -> None:
    MPI.COMM_SELF.Sendrecv([packed, packed.size, MPI.BYTE], 0, 0, [memory[start:], 1, datatype], 0, 0)
