"""Messages of derived datatypes in device memory: bounds, absolute addresses, streams and graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import Rig, rig_on

Array = npt.NDArray[Any]


@contextmanager
def committed(*datatypes: MPI.Datatype) -> Iterator[tuple[MPI.Datatype, ...]]:
    try:
        yield tuple(datatype.Commit() for datatype in datatypes)
    finally:
        for datatype in datatypes:
            datatype.Free()


def columns(count: int) -> MPI.Datatype:
    """Three columns of an array of ``count`` rows and 8 columns of int32."""
    return MPI.INT32_T.Create_vector(count, 3, 8)


def grid(rank: int, count: int, key: int = 0) -> Array:
    return np.random.default_rng([rank, key, count]).integers(0, 1 << 30, (count, 8)).astype(np.int32)


@pytest.mark.parametrize("method", ["Send", "Recv", "Isend", "Irecv"])
def test_elements_beyond_the_array_are_refused(rig: Rig, method: str) -> None:
    refusal = r"buf: .*byte 332 of a buffer of 320 bytes"
    with committed(columns(11)) as (datatype,), pytest.raises(InvalidUsageError, match=refusal):
        getattr(rig.comm, method)([DeviceArray(rig.device, grid(0, 10)), 1, datatype], rig.right)
    rig.comm.Barrier()


@pytest.mark.parametrize("handle", ["ipc", "fd"])
@pytest.mark.parametrize("sender", ["addresses", "host"])
@pytest.mark.parametrize("length", [1, 3])
def test_absolute_addresses(parent: mpicomm.Communicator, handle: str, sender: str, length: int) -> None:
    with rig_on(parent, handle) as rig:
        sent, received = (
            [DeviceArray(rig.device, np.full(50, value, np.int32)) for value in (rig.rank, 5, -1)] for _ in range(2)
        )
        of_sent, of_received = (
            MPI.Datatype.Create_struct(
                [30, 20], [first.memory.ctypes.data, last.memory.ctypes.data + 40], [MPI.INT32_T] * 2
            )
            for first, _, last in (sent, received)
        )
        with committed(of_sent, of_received) as (source, target):
            given: Any = [MPI.BOTTOM, 1, source]
            if sender == "host" or length == 1:
                given = np.full(50 if length == 3 else 7, rig.rank, np.int32)
            request = rig.comm.Isend(given, rig.right)
            rig.comm.Recv([MPI.BOTTOM, 1, target], rig.left)
            request.Wait()
        first, untouched, last = (each.get() for each in received)
        assert (first[: 30 if length == 3 else 7] == rig.left).all()
        assert (first[30 if length == 3 else 7 :] == rig.rank).all() and (untouched == 5).all()
        expected = -1 if sender == "addresses" or length == 1 else rig.left
        assert (last[10:30] == expected).all() and (last[:10] == -1).all() and (last[30:] == -1).all()


@pytest.mark.parametrize("handle", ["ipc", "fd"])
def test_a_receive_writes_only_its_elements(
    parent: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch, handle: str
) -> None:
    """Work on another stream may write the gaps meanwhile."""
    with rig_on(parent, handle) as rig, committed(columns(10)) as (datatype,):
        received = DeviceArray(rig.device, np.full((10, 8), -1, np.int32))
        begin, copy = received.memory.ctypes.data, rig.device.copy

        def copy_elsewhere(target: int, source: int, nbytes: int, stream: int) -> None:
            assert not begin <= target < begin + received.memory.nbytes
            copy(target, source, nbytes, stream)

        monkeypatch.setattr(rig.device, "copy", copy_elsewhere)
        for count in (10, 5):  # the second message is shorter
            request = rig.comm.Isend(grid(rig.rank, count)[:, :3].copy(), rig.right)
            rig.comm.Irecv([received, 1, datatype], rig.left).Wait()
            request.Wait()
            assert (received.get()[:count, :3] == grid(rig.left, count)[:, :3]).all()
            assert (received.get()[:, 3:] == -1).all()


def test_in_stream_order_and_in_a_graph(comm: mpicomm.Communicator, xp: Any) -> None:
    if comm.device == "cpu" or comm.size == 1:
        pytest.skip("kernels match messages between GPUs")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    count = 1000
    stream = xp.cuda.Stream(non_blocking=True)
    with committed(columns(count), MPI.INT32_T.Create_contiguous(3 * count)) as (datatype, packed), stream:
        sent, received = xp.asarray(grid(comm.rank, count)), xp.full((count, 8), -1, np.int32)
        status = MPI.Status()
        comm.Sendrecv([sent, 1, datatype], right, 0, [received, 1, datatype], left, 0, status, algorithm="one_shot")
        assert status.Get_count(MPI.INT32_T) == 3 * count
        expected = grid(left, count)[:, :3]
        assert (received.get()[:, :3] == expected).all() and (received.get()[:, 3:] == -1).all()
        stream.begin_capture()
        comm.Sendrecv([sent, 1, datatype], right, 0, [received, 1, packed], left, 0)
        graph = stream.end_capture()
        for key in range(3):
            sent.set(grid(comm.rank, count, key), stream=stream)
            graph.launch(stream)
            assert (received.get().ravel()[: 3 * count] == grid(left, count, key)[:, :3].ravel()).all()
        comm.check(stream)
