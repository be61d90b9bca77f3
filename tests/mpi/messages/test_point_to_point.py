"""Point-to-point calls: MPI's own on host arrays, matched by MPI on device arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.messages.rendezvous_header import KERNEL_NBYTES
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.inputs.buffers import Placed
from tests.helpers.jobs.pace import stretched
from tests.helpers.references.reductions import Array
from tests.helpers.rigs.buffered_sends import room_for_buffered_sends
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.message_rigs import LARGE, Rig, content, same, take_for_gpu


def test_mpi_takes_floats_as_ranks_and_tags_and_refuses_others(comm: mpicomm.Communicator) -> None:
    right: Any = float((comm.rank + 1) % comm.size)
    left: Any = float((comm.rank - 1) % comm.size)
    tags: Any = [float(tag) for tag in range(5)]
    x, y = np.full(3, comm.rank), np.zeros(3, int)
    requests = [comm.Irecv(y, left, tags[0]), comm.irecv(None, left, tags[1])]
    comm.Send(x, right, tags[0])
    comm.ssend(comm.rank, right, tags[1])
    assert MPI.Request.Wait(requests[0]) and requests[1].wait() == left and (y == left).all()
    assert comm.sendrecv(comm.rank, right, tags[2], None, left, tags[2]) == left
    comm.Sendrecv(x, right, tags[3], y, left, tags[3])
    comm.Sendrecv_replace(x, right, tags[4], left, tags[4])
    assert (x == left).all() and (y == left).all()
    calls: list[Any] = [comm.Send, comm.Recv, comm.send, MPI.COMM_WORLD.Send]
    for wrong in (None, "1", 2**70):
        for call in calls:
            with pytest.raises((TypeError, OverflowError)) as error:
                call(x, wrong)
            assert "memoryview" not in str(error.value)


def test_streams_of_host_arrays_are_refused() -> None:
    with communicator("cpu") as comm:
        for call in (
            lambda: comm.Send(np.ones(1), MPI.PROC_NULL, stream=1),
            lambda: comm.Irecv(np.ones(1), MPI.PROC_NULL, stream=1),
        ):
            with pytest.raises(InvalidUsageError, match="stream=1"):
                call()


def test_the_first_use_of_a_duplicate_may_be_a_message_between_two(device: str) -> None:
    """Or of a rank to itself. No call waits for the ranks that do not take part."""
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("needs two ranks")
    with communicator(device, timeout_s=stretched(3.0)) as comm, array_module(comm) as xp, comm.Dup() as child:
        double = take_for_gpu(child) if device == "cpu" else None
        for count in (5, KERNEL_NBYTES // 4 + 1):

            def place(value: int, count: int = count) -> tuple[Any, Callable[[], Array]]:
                content = np.full(count, value, np.float32)
                placed = Placed(xp, content) if double is None else None
                array = DeviceArray(double, content) if double is not None else None
                return (placed.array, placed.get) if placed is not None else (array, array.get)  # type: ignore[union-attr]

            if child.rank == 0:
                itself, content = place(0)
                request = child.Irecv(itself, 0)
                child.Send(place(7)[0], 0)
                request.Wait()
                assert (content() == 7).all()
            MPI.COMM_WORLD.Barrier()
            buffer, content = place(child.rank)
            if child.rank == 0:
                child.Send(buffer, 1)
                child.Irecv(buffer, 1).Wait()
                assert (content() == 1).all()
            elif child.rank == 1:
                received, content = place(0)
                child.Recv(received, 0)
                child.Isend(buffer, 0).Wait()
                assert (content() == 0).all()
        child.check()
        assert not child._session._groups


def test_the_memory_of_messages_is_used_again(comm: mpicomm.Communicator, xp: Any) -> None:
    """The messages are longer in all than the outbox. Each array is overwritten as soon as that is allowed."""
    if comm.device == "cpu":
        pytest.skip("test_outbox_places.py has the memory of doubles")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = xp.empty(1 << 22, np.int32), xp.empty(1 << 22, np.int32)
    for number in range(200):
        sent[...] = number * 100 + comm.rank
        if number % 2:
            comm.Sendrecv(sent, right, number, received, left, number)
        else:
            MPI.Request.Waitall([comm.Irecv(received, left, number), comm.Isend(sent, right, number)])
        assert int(received.min()) == int(received.max()) == number * 100 + left


@pytest.fixture
def buffer_of_mpi(rig: Rig) -> Iterator[None]:
    """Memory for buffered sends."""
    with room_for_buffered_sends(rig.comm, 1 << 20):
        yield


@pytest.mark.usefixtures("buffer_of_mpi")
@pytest.mark.parametrize("count", [0, 5, LARGE])
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
