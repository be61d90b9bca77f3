"""Messages of device arrays that stay on the devices, in stream order or complete on return; devices are threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, KERNEL_NBYTES
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.inputs.buffers import Placed
from tests.helpers.jobs.pace import HANG_S, stretched
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.message_rigs import LARGE, Array, Rig, content, same, take_for_gpu


def test_streams_of_the_caller(rig: Rig) -> None:
    array, received = rig.empty(LARGE), rig.empty(LARGE)
    array.fill(rig.rank, stream=7)
    request = rig.comm.Isend(array, rig.right, stream=7)
    rig.comm.Recv(received, rig.left, stream=8)
    copy = rig.empty(LARGE)
    rig.device.copy(copy.memory.ctypes.data, received.memory.ctypes.data, received.memory.nbytes, 8)
    request.Wait()
    same(copy, np.full(LARGE, rig.left, np.int32))


def test_tags_out_of_order_and_many_in_flight(rig: Rig) -> None:
    tags = range(12)
    received = [rig.empty(LARGE + tag) for tag in tags]
    receives = [rig.comm.Irecv(received[tag], rig.left, tag) for tag in tags]
    arrays = [rig.of(rig.rank, LARGE + tag, tag) for tag in tags]
    sends = [rig.comm.Isend(arrays[tag], rig.right, tag) for tag in reversed(tags)]
    statuses = [MPI.Status() for _ in tags]
    MPI.Request.Waitall(receives, statuses)
    MPI.Request.Waitall(sends)
    for tag in tags:
        assert (statuses[tag].source, statuses[tag].tag) == (rig.left, tag)
        assert statuses[tag].Get_count(MPI.INT32_T) == LARGE + tag
        same(received[tag], content(rig.left, LARGE + tag, tag))


def test_a_receive_is_cancelled(rig: Rig) -> None:
    persistent = rig.comm.Recv_init(np.zeros(LARGE, np.int32), rig.left, 77)
    persistent.Start()
    requests: list[MPI.Request] = [persistent]
    requests += [rig.comm.Irecv(array, rig.left, 77) for array in (np.zeros(LARGE, np.int32), rig.empty(LARGE))]
    for request in requests:
        status = MPI.Status()
        request.Cancel()
        request.Wait(status)
        assert status.Is_cancelled()
    persistent.Free()
    rig.comm.Barrier()  # else a receive that is not cancelled yet may take the next message
    received = rig.empty(LARGE)
    rig.comm.Sendrecv(rig.of(rig.rank, LARGE), rig.right, 77, received, rig.left, 77)
    same(received, content(rig.left, LARGE))


@pytest.mark.parametrize("count", [17, LARGE])
def test_what_has_come_is_not_cancelled(rig: Rig, count: int) -> None:
    received, may_land = rig.empty(count), threading.Event()
    rig.device.enqueue(7, may_land.wait)
    request, status = rig.comm.Irecv(received, rig.left, stream=7), MPI.Status()
    rig.comm.Send(rig.of(rig.rank, count), rig.right)
    try:
        for _ in range(20):  # until MPI has received
            assert not request.Test()
            time.sleep(0.005)
        request.Cancel()
    finally:
        may_land.set()
    request.Wait(status)
    assert not status.Is_cancelled() and status.Get_count(MPI.INT32_T) == count
    same(received, content(rig.left, count))


def test_capture_is_refused(rig: Rig) -> None:
    rig.device.capturing = True
    for call in (
        lambda: rig.comm.Ssend(rig.empty(LARGE), MPI.PROC_NULL),
        lambda: rig.comm.Isend(rig.empty(1), MPI.PROC_NULL),
        lambda: rig.comm.Sendrecv_replace(rig.empty(LARGE), MPI.PROC_NULL, source=MPI.PROC_NULL),
        lambda: rig.comm.Irecv(rig.empty(LARGE), MPI.PROC_NULL),
    ):
        with pytest.raises(InvalidUsageError, match="cannot be part of a CUDA graph"):
            call()
    rig.device.capturing = False
    rig.comm.Recv(rig.empty(LARGE), MPI.PROC_NULL)
    rig.comm.Sendrecv(rig.empty(LARGE), MPI.PROC_NULL, source=MPI.PROC_NULL)


def test_a_communicator_made_from_another_has_its_own_secret(rig: Rig) -> None:
    half = rig.comm.Split(rig.rank % 2)
    assert isinstance(half, mpicomm.Communicator)
    part = Rig(half, take_for_gpu(half))
    received = part.empty(LARGE)
    half.Sendrecv(part.of(rig.rank, LARGE), part.right, 0, received, part.left, 0)
    same(received, content(2 * part.left + rig.rank % 2, LARGE))
    # A description of the parent, as MPI carries it, is data on the child.
    request = rig.comm.Isend(rig.of(rig.rank, LARGE), rig.right)
    carried, copy = np.empty(HEADER_NBYTES, np.uint8), np.empty(HEADER_NBYTES, np.uint8)
    MPI.Intracomm(rig.comm).Recv(carried, rig.left)
    request.Wait()
    half.Sendrecv(carried, half.rank, 0, copy, half.rank, 0)
    assert copy.tobytes() == carried.tobytes()
    received = rig.empty(LARGE)
    rig.comm.Sendrecv(carried, rig.rank, 0, received, rig.rank, 0)
    same(received, content(rig.left, LARGE))
    half.Free()


def test_a_sender_whose_device_stops_is_named(parent: mpicomm.Communicator) -> None:
    for way in ("Recv", "Irecv", "host"):
        comm = parent.Dup()
        device = take_for_gpu(comm, timeout_s=stretched(0.3) if comm.rank == 1 else HANG_S)
        rig = Rig(comm, device)
        if comm.rank == 0:
            held = rig.empty(1)
            device.enqueue(0, lambda: time.sleep(stretched(1.0)))  # as if it had died: the data does not come
            comm.Send(rig.empty(LARGE), 1)
            assert held.get().size == 1
        elif comm.rank == 1:
            with pytest.raises(CollectiveTimeoutError, match="from rank 0 did not come") as info:
                if way == "Recv":
                    comm.Recv(rig.empty(LARGE), 0)
                    comm.check()
                elif way == "Irecv":
                    comm.Irecv(rig.empty(LARGE), 0).Wait()
                else:
                    comm.Recv(np.zeros(LARGE, np.int32), 0)
            assert info.value.ranks == (0,)
            with pytest.raises(CollectiveTimeoutError):
                comm.Send(rig.empty(LARGE), 0)
        comm.Free()


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
        pytest.skip("test_outbox_slots.py has the memory of doubles")
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    sent, received = xp.empty(1 << 22, np.int32), xp.empty(1 << 22, np.int32)
    for number in range(200):
        sent[...] = number * 100 + comm.rank
        if number % 2:
            comm.Sendrecv(sent, right, number, received, left, number)
        else:
            MPI.Request.Waitall([comm.Irecv(received, left, number), comm.Isend(sent, right, number)])
        assert int(received.min()) == int(received.max()) == number * 100 + left


def test_a_receive_in_stream_order_returns_before_the_message_is_there(rig: Rig) -> None:
    seen: list[bool] = []
    for tag in range(2):  # the first call may wait for other reasons
        sent, received = rig.of(rig.rank, LARGE, tag), rig.empty(LARGE)
        rig.comm.Isend(sent, rig.right, tag).Wait()
        rig.device.enqueue(0, lambda: time.sleep(0.5))
        rig.comm.Recv(received, rig.left, tag)
        seen.append(received.memory.tobytes() == content(rig.left, LARGE, tag).tobytes())
    assert not all(seen)
