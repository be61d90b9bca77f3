"""Alltoallv arguments whose counts are arrays on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.collectives.call import Arguments, Call
from mpicomm.collectives.operations import ALLTOALLV
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.device_counts import CountedBuffers, DeviceIndices, read_counted
from tests.helpers.fakes.addresses import DeviceArray, read_device_arrays

SIZE = 3


@pytest.fixture(autouse=True)
def arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    read_device_arrays(monkeypatch)


def array(pointer: int, count: int = SIZE, dtype: str = "int64") -> DeviceArray:
    return DeviceArray(pointer, count, np.dtype(dtype))


def read(send: Any, receive: Any, algorithm: str = "auto") -> CountedBuffers | None:
    return read_counted(send, receive, size=SIZE, algorithm=algorithm)


X, Y = array(0x1000, 20, "float32"), array(0x2000, 30, "float32")
COUNTS, CAME, DISPLS = array(0x3000, dtype="int32"), array(0x4000), array(0x5000)


def test_counts_in_host_memory_are_read_as_before() -> None:
    for counts in ([1, 2, 3], np.array([1, 2, 3]), ([1, 2, 3], [0, 1, 3]), 4, None):
        assert read([X, counts], [Y, counts]) is None
    assert read(X, Y) is None
    assert read(MPI.IN_PLACE, [Y, [1, 2, 3]]) is None


def test_both_buffers_with_counts() -> None:
    found = read([X, COUNTS], [Y, (CAME, DISPLS), "f"])
    assert found is not None
    send, receive = found.send, found.receive
    assert (send.pointer, send.room, send.displs) == (0x1000, 20, None)
    assert send.counts == DeviceIndices(0x3000, is_wide=False, nbytes=12)
    assert (receive.pointer, receive.room) == (0x2000, 30)
    assert receive.counts == DeviceIndices(0x4000, is_wide=True, nbytes=24)
    assert receive.displs == DeviceIndices(0x5000, is_wide=True, nbytes=24)
    assert found.itemsize == 4


@pytest.mark.parametrize("displs", [7, [0, 7, 14], (0, 7, 14), np.array([0, 7, 14])])
def test_displacements_in_host_memory(displs: Any) -> None:
    found = read([X, (COUNTS, displs)], [Y, CAME, displs, MPI.FLOAT])
    assert found is not None
    assert found.send.displs == found.receive.displs == (0, 7, 14)


@pytest.mark.parametrize(
    ("send", "receive", "text"),
    [
        ([X, COUNTS], [Y, [1, 2, 3]], r"the counts of recvbuf are \[1, 2, 3\] in host memory, and sendbuf has counts"),
        ([X, [1, 2, 3]], [Y, CAME], r"the counts of sendbuf are \[1, 2, 3\] in host memory, and recvbuf has counts"),
        ([X, COUNTS], Y, "the counts of recvbuf are missing, and sendbuf has counts"),
        ([X, ([1, 2, 3], DISPLS)], [Y, CAME], r"the counts of sendbuf are \[1, 2, 3\] in host memory: pass"),
        ([X, COUNTS], [Y, array(0x4000, dtype="float32")], "the counts of recvbuf have type float32"),
        ([X, COUNTS], [Y, array(0x4000, dtype="uint64")], "have type uint64: pass int32 or int64"),
        ([X, array(0x3000, 2)], [Y, CAME], "the counts of sendbuf are 2 integers for 3 ranks"),
        ([X, (COUNTS, array(0x5000, 4))], [Y, CAME], "the displacements of sendbuf are 4 integers for 3 ranks"),
        ([X, (COUNTS, [0, 1])], [Y, CAME], "2 displacements for 3 ranks"),
        ([X, COUNTS], [Y, COUNTS], "the counts of recvbuf and counts or displacements of sendbuf overlap"),
        ([X, COUNTS], [Y, (CAME, CAME)], "the counts of recvbuf and displacements of recvbuf overlap"),
        ([X, COUNTS], [Y, array(0x2010)], "the counts of recvbuf and recvbuf overlap"),
        ([X, COUNTS], [X, CAME], "recvbuf and sendbuf overlap"),
        ([X, array(0x2000)], [Y, CAME], "recvbuf and counts or displacements of sendbuf overlap"),
        (MPI.IN_PLACE, [Y, CAME], "sendbuf=MPI.IN_PLACE beside counts on the GPU"),
        ([np.zeros(20, "f"), COUNTS], [Y, CAME], "sendbuf is in host memory, and its counts are on the GPU"),
        ([X, COUNTS], [array(0x2000, 30), CAME], "float32, recvbuf of int64: pass elements of one size"),
        ([X, COUNTS], [array(0x10000, 1 << 31, "float32"), array(0x4000, dtype="int32")], "pass counts of type int64"),
    ],
)
def test_bad_arguments(send: Any, receive: Any, text: str) -> None:
    with pytest.raises(InvalidUsageError, match=text):
        read(send, receive)


def test_mpi_cannot_read_them() -> None:
    with pytest.raises(InvalidUsageError, match="which MPI cannot read"):
        read([X, COUNTS], [Y, CAME], "mpi")


def test_a_call_with_them_differs_from_a_call_with_other_counts() -> None:
    def hash_of(send: Any, receive: Any) -> int:
        return Call(ALLTOALLV, Arguments(send, receive), 0, SIZE).signature.hash32

    here = hash_of([X, COUNTS], [Y, CAME])
    assert here == hash_of([X, (COUNTS, DISPLS)], [Y, CAME])
    assert here != hash_of([X, [1, 2, 3]], [Y, [1, 2, 3]])
    wide = array(0x8000, 9, "float64")
    assert here != hash_of([wide, COUNTS], [array(0x9000, 9, "float64"), CAME])
