"""Persistent and buffered messages of device arrays, between processes whose devices are threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.buffered_sends import room_for_buffered_sends
from tests.helpers.rigs.message_rigs import LARGE, Rig, content, same

COUNTS = [0, 5, LARGE]


@pytest.fixture(autouse=True)
def buffer_of_mpi(rig: Rig) -> Iterator[None]:
    """Memory for buffered sends."""
    with room_for_buffered_sends(rig.comm, 1 << 20):
        yield


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("method", ["Send_init", "Ssend_init", "Bsend_init", "Rsend_init"])
def test_each_start_sends_the_arrays_new_content(rig: Rig, method: str, count: int) -> None:
    array, received, status = rig.empty(count), rig.empty(count), MPI.Status()
    send = getattr(rig.comm, method)(array, rig.right, 4)
    receive = rig.comm.Recv_init(received, rig.left, 4)
    for turn in range(3):
        array.fill(10 * turn + rig.rank)
        receive.Start()
        rig.comm.Barrier()  # Rsend needs a receive that is posted
        send.Start()
        send.Wait()
        array.fill(-1)  # the request is complete, so the message must not have it
        receive.Wait(status)
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 4, count)
        same(received, np.full(count, 10 * turn + rig.left, np.int32))
    send.Free()
    receive.Free()


def test_a_started_request_is_refused_a_second_start(rig: Rig) -> None:
    send = rig.comm.Send_init(rig.of(rig.rank, LARGE), rig.right)
    send.Start()
    with pytest.raises(InvalidUsageError, match="is active"):
        send.Start()
    rig.comm.Recv(rig.empty(LARGE), rig.left)
    send.Wait()
    assert send and send != MPI.REQUEST_NULL and send == send
    send.Free()
    assert not send and send == MPI.REQUEST_NULL


def by_address(array: DeviceArray) -> list[object]:
    """The memory of a device array that only its address names."""
    memory = array.memory
    fake_driver.own(memory)
    return [MPI.memory.fromaddress(memory.ctypes.data, 0), memory.size, MPI.INT32_T]


def test_memory_by_address_is_there_when_a_call_returns(rig: Rig) -> None:
    """No library says on which stream later work is, so blocking calls wait for their copies."""
    for turn, count in enumerate((5, LARGE)):
        array, received = rig.of(rig.rank, count), rig.empty(count)
        rig.device.synchronize()
        request = rig.comm.Isend(by_address(rig.of(rig.rank, count)), rig.right, turn)
        rig.comm.Recv(by_address(received), rig.left, turn)
        assert received.memory.tobytes() == content(rig.left, count).tobytes()
        request.Wait()
        request = rig.comm.Irecv(by_address(received), rig.left, turn)
        rig.comm.Send(by_address(array), rig.right, turn)
        array.memory[:] = -1  # at once, on no stream
        request.Wait()
        assert received.memory.tobytes() == content(rig.left, count).tobytes()
        array.memory[:] = content(rig.rank, count)
        around = np.frombuffer(
            memoryview((ctypes.c_char * (4 * count)).from_address(received.memory.ctypes.data)), np.int32
        )
        rig.comm.Sendrecv(by_address(array), rig.right, 0, around, rig.left, 0)
        assert received.memory.tobytes() == content(rig.left, count).tobytes()


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_host_arrays_of_types_that_mpi_lacks_are_messages_too(
    rig: Rig, parent: mpicomm.Communicator, name: str
) -> None:
    dtype = np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    for comm in (rig.comm, parent):
        for count in (6, 4 * LARGE):
            sent = content(rig.rank, count).view(np.uint8)[: count * dtype.itemsize].view(dtype)
            expected = content(rig.left, count).view(np.uint8)[: count * dtype.itemsize].tobytes()
            for number in range(8):
                received = np.zeros(count, dtype)
                if number == 0:
                    comm.Sendrecv(sent, rig.right, 0, received, rig.left, 0)
                elif number == 1:
                    comm.Isendrecv(sent, rig.right, 0, received, rig.left, 0).Wait()
                elif number == 2:
                    request = comm.Irecv(received, rig.left)
                    comm.Send(sent, rig.right)
                    request.Wait()
                elif number == 3:
                    request = comm.Isend([sent, count], rig.right)
                    comm.Recv([received, count], rig.left)
                    request.Wait()
                elif number == 4:
                    send, receive = comm.Send_init(sent, rig.right), comm.Recv_init(received, rig.left)
                    for each in (send, receive):
                        each.Start()
                    for each in (send, receive):
                        each.Wait()
                        each.Free()
                elif number < 7:
                    request = comm.Isend(sent, rig.right)
                    message = comm.Mprobe(rig.left)
                    if number == 5:
                        message.Recv(buf=received)
                    else:
                        message.Irecv(received).Wait()
                    request.Wait()
                else:
                    received[:] = sent
                    comm.Sendrecv_replace(received, rig.right, 0, rig.left, 0)
                assert received.tobytes() == expected
            sent.flags.writeable = False
            with pytest.raises(InvalidUsageError, match="read-only"):
                comm.Irecv(sent, rig.left)
