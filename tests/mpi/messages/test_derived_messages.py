"""Messages of derived datatypes in device memory, in any mixture with plain arrays and with host memory."""

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
from tests.helpers.rigs.message_rigs import Rig

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


@pytest.fixture
def on_device(rig: Rig) -> Any:
    from tests.helpers.fakes.message_devices import DeviceArray

    return lambda content: DeviceArray(rig.device, content)


@pytest.mark.parametrize("sender", ["derived", "plain"])
@pytest.mark.parametrize("receiver", ["derived", "plain"])
def test_kernels_pack_and_unpack(rig: Rig, on_device: Any, sender: str, receiver: str) -> None:
    for tag, count in enumerate((1, 5, 500, 3000, 20000, 5, 500)):
        sent, received = grid(rig.rank, count), on_device(np.full((count, 8), -1, np.int32))
        expected, before, status = grid(rig.left, count)[:, :3], rig.device.packed, MPI.Status()
        with committed(columns(count)) as (datatype,):
            spec = [on_device(sent), 1, datatype]
            if sender == "plain":
                spec = on_device(np.ascontiguousarray(sent[:, :3]))
            target = [received, 1, datatype] if receiver == "derived" else [received, 3 * count, MPI.INT32_T]
            rig.comm.Sendrecv(spec, rig.right, tag, target, rig.left, tag, status)
        found = received.get()
        assert status.Get_count(MPI.INT32_T) == 3 * count
        if receiver == "derived":
            assert (found[:, :3] == expected).all() and (found[:, 3:] == -1).all()
        else:
            assert (found.ravel()[: 3 * count] == expected.ravel()).all()
        assert rig.device.packed - before == (sender == "derived") + (receiver == "derived")
    assert rig.device.host_copies == 0


def test_structures_meet_lists(rig: Rig, on_device: Any) -> None:
    count = 2000
    order, taken = np.random.default_rng(4).permutation(count), np.r_[0:8, 12:16]
    fields = MPI.Datatype.Create_struct([1, 1], [0, 12], [MPI.DOUBLE, MPI.INT32_T])
    structures, listed = fields.Create_resized(0, 24), fields.Create_hindexed_block(1, (24 * order).tolist())
    with committed(fields, structures, listed):
        sent = [np.random.default_rng(rank).integers(0, 256, (count, 24)).astype(np.uint8) for rank in range(9)]
        received = on_device(np.full((count, 24), 7, np.uint8))
        spec = [on_device(sent[rig.rank]), count, structures]
        rig.comm.Sendrecv(spec, rig.right, 0, [received, 1, listed], rig.left, 0)
        expected = np.full((count, 24), 7, np.uint8)
        expected[order[:, None], taken] = sent[rig.left][:, taken]
        assert (received.get() == expected).all()
    assert rig.device.packed == 2 and rig.device.host_copies == 0


def test_a_message_that_is_shorter_than_the_datatypes(rig: Rig, on_device: Any) -> None:
    received, status = on_device(np.full((100, 8), -1, np.int32)), MPI.Status()
    with committed(columns(10)) as (datatype,), committed(datatype.Create_resized(0, 320)) as (resized,):
        sent = on_device(grid(rig.rank, 40))
        rig.comm.Sendrecv([sent, 4, resized], rig.right, 0, [received, 10, resized], rig.left, 0, status)
        assert status.Get_elements(resized) == 120
    found = received.get()
    assert (found[:40, :3] == grid(rig.left, 40)[:, :3]).all()
    assert (found[40:] == -1).all() and (found[:, 3:] == -1).all()


def test_a_message_that_is_longer_than_the_datatype(rig: Rig, on_device: Any) -> None:
    received = on_device(np.full((100, 8), -1, np.int32))
    for count in (20, 4000):
        with committed(columns(10), columns(count)) as (short, long):
            request = rig.comm.Isend([on_device(grid(rig.rank, count)), 1, long], rig.right)
            with pytest.raises(MPI.Exception) as raised:
                rig.comm.Recv([received, 1, short], rig.left)
            assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
            request.Wait()
    assert (received.get() == -1).all()


@pytest.mark.parametrize("method", ["Send", "Recv", "Isend", "Irecv"])
def test_elements_beyond_the_array_are_refused(rig: Rig, on_device: Any, method: str) -> None:
    refusal = r"buf: .*byte 332 of a buffer of 320 bytes"
    with committed(columns(11)) as (datatype,), pytest.raises(InvalidUsageError, match=refusal):
        getattr(rig.comm, method)([on_device(grid(0, 10)), 1, datatype], rig.right)
    rig.comm.Barrier()


@pytest.mark.parametrize("sender", ["addresses", "host"])
@pytest.mark.parametrize("length", [1, 3])
def test_absolute_addresses(rig: Rig, on_device: Any, sender: str, length: int) -> None:
    sent, received = ([on_device(np.full(50, value, np.int32)) for value in (rig.rank, 5, -1)] for _ in range(2))
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
