"""Messages between arrays of a device and of the host, probed, matched and of any datatype; devices are threads."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm import InvalidUsageError
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.message_rigs import LARGE, SIZES, Rig, content, same

RECEIVES = ["Recv", "Irecv", "Waitall", "Sendrecv", "Sendrecv_replace", "Isendrecv", "Isendrecv_replace", "Recv_init"]
MATCHED = ["Mprobe", "Improbe", "Mprobe Irecv"]


@pytest.mark.parametrize("way", [*RECEIVES, *MATCHED])
@pytest.mark.parametrize("count", [HEADER_NBYTES // 4, LARGE, 5 * LARGE + 3])
def test_a_host_array_receives_from_a_device_array(rig: Rig, way: str, count: int) -> None:
    """Also data that has the length of a description."""
    comm, expected, status = rig.comm, content(rig.left, count), MPI.Status()
    host = np.zeros(count, np.int32)
    nothing = np.zeros(0, np.int32)
    sent = comm.Isend(rig.of(rig.rank, count), rig.right, 3)
    other = comm.Irecv(np.ones(count, np.int32), rig.left if "endrecv" in way else MPI.PROC_NULL, 4)
    if way == "Recv":
        comm.Recv(host, rig.left, 3, status)
    elif way == "Irecv":
        comm.Irecv(host, rig.left, 3).Wait(status)
    elif way == "Waitall":
        statuses = [status]
        MPI.Request.Waitall([comm.Irecv(host, rig.left, 3)], statuses)
        status = statuses[0]
    elif way == "Sendrecv":
        comm.Sendrecv(nothing, rig.right, 4, host, rig.left, 3, status)
    elif way == "Sendrecv_replace":
        comm.Sendrecv_replace(host, rig.right, 4, rig.left, 3, status)
    elif way == "Isendrecv":
        comm.Isendrecv(nothing, rig.right, 4, host, rig.left, 3).Wait(status)
    elif way == "Isendrecv_replace":
        comm.Isendrecv_replace(host, rig.right, 4, rig.left, 3).Wait(status)
    elif way == "Recv_init":
        request = comm.Recv_init(host, rig.left, 3)
        request.Start()
        request.Wait(status)
        host[:] = 0
        request.Start()
        comm.Send(rig.of(rig.rank, count), rig.right, 3)
        MPI.Request.Waitall([request])
        request.Free()
    else:
        message = None
        while message is None:
            message = getattr(comm, way.split()[0])(rig.left, 3, status)
        assert status.Get_count(MPI.INT32_T) == count and status.source == rig.left
        status = MPI.Status()
        if way.endswith("Irecv"):
            message.Irecv(host).Wait(status)
        else:
            message.Recv(host, status)
        assert message == MPI.MESSAGE_NULL
    assert host.tobytes() == expected.tobytes()
    assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 3, count)
    MPI.Request.Waitall([sent, other])


def test_a_device_array_receives_from_a_host_array(rig: Rig) -> None:
    for count in SIZES:
        received, status = rig.empty(count + 1), MPI.Status()
        request = rig.comm.Isend(content(rig.rank, count), rig.right)
        rig.comm.Recv(received, rig.left, status=status)
        request.Wait()
        assert status.Get_count(MPI.INT32_T) == count
        same(received, content(rig.left, count))


def test_matched_messages_are_received_into_device_arrays(rig: Rig) -> None:
    for count in (5, LARGE):
        request = rig.comm.Isend(rig.of(rig.rank, count), rig.right)
        received, status = rig.empty(count), MPI.Status()
        message = rig.comm.Mprobe(rig.left, status=status)
        assert message and status.Get_count(MPI.INT32_T) == count
        message.Recv(received)
        same(received, content(rig.left, count))
        request.Wait()


@pytest.mark.parametrize("on_device", [False, True])
def test_datatypes_that_are_no_plain_elements(rig: Rig, on_device: bool) -> None:
    blocks = 3 * LARGE // 2
    every_other = MPI.INT32_T.Create_vector(blocks, 1, 2).Commit()
    array = rig.empty(2 * blocks) if on_device else np.zeros(2 * blocks, np.int32)
    sent = rig.comm.Isend(rig.of(rig.rank, blocks), rig.right)
    rig.comm.Recv([array, 1, every_other], rig.left)
    sent.Wait()
    got = array.get() if isinstance(array, DeviceArray) else array
    assert got[::2].tobytes() == content(rig.left, blocks).tobytes() and not got[1::2].any()
    sent = rig.comm.Isend([array, 1, every_other], rig.right)
    received = rig.empty(blocks)
    rig.comm.Recv(received, rig.left)
    sent.Wait()
    same(received, content((rig.rank - 2) % rig.size, blocks))
    every_other.Free()


@pytest.mark.parametrize("receive", ["Recv", "Irecv", "Mprobe", "device"])
def test_probes_tell_the_size_and_take_nothing_away(rig: Rig, receive: str) -> None:
    comm, status = rig.comm, MPI.Status()
    sends = [comm.Isend(rig.of(rig.rank, LARGE + tag, tag), rig.right, tag) for tag in range(4)]
    sends.append(comm.Isend(np.full(HEADER_NBYTES, 9, np.uint8), rig.right, 4))
    comm.Barrier()
    for _ in range(2):
        assert comm.Iprobe(rig.left, 2, status)  # after two others
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 2, LARGE + 2)
        comm.Probe(rig.left, 4, status)
        assert (status.source, status.tag, status.Get_count(MPI.BYTE)) == (rig.left, 4, HEADER_NBYTES)
    assert not comm.Iprobe(rig.left, 99)
    for tag in range(4):  # in the order in which they were sent, although a later one was probed first
        comm.Probe(rig.left, MPI.ANY_TAG, status)
        assert (status.tag, status.Get_count(MPI.INT32_T)) == (tag, LARGE + tag)
        host = np.zeros(LARGE + tag, np.int32)
        if receive == "Recv":
            comm.Recv(host, rig.left, MPI.ANY_TAG, status)
        elif receive == "Irecv":
            comm.Irecv(host, rig.left, MPI.ANY_TAG).Wait(status)
        elif receive == "Mprobe":
            comm.Mprobe(rig.left).Recv(host, status)
        else:
            received = rig.empty(LARGE + tag)
            comm.Recv(received, rig.left, MPI.ANY_TAG, status)
            host = received.get()
        assert (status.source, status.tag) == (rig.left, tag)
        assert host.tobytes() == content(rig.left, LARGE + tag, tag).tobytes()
    last = np.zeros(HEADER_NBYTES, np.uint8)
    comm.Recv(last, rig.left, 4, status)
    assert (last == 9).all() and (status.source, status.Get_count(MPI.BYTE)) == (rig.left, HEADER_NBYTES)
    MPI.Request.Waitall(sends)
    assert not comm.Iprobe()


def test_python_objects_of_the_length_of_a_description(rig: Rig) -> None:
    sent = next(b"x" * n for n in range(HEADER_NBYTES) if len(MPI.pickle.dumps(b"x" * n)) == HEADER_NBYTES)
    takes: list[Callable[[], object]] = [
        lambda: rig.comm.recv(),
        lambda: rig.comm.irecv().wait(),
        lambda: rig.comm.mprobe().recv(),
    ]
    for take in takes:
        request, status = rig.comm.isend(sent, rig.right), MPI.Status()
        rig.comm.Probe(status=status)
        assert status.Get_count(MPI.BYTE) == HEADER_NBYTES
        assert take() == sent
        request.wait()


@pytest.mark.parametrize("method", ["Sendrecv", "Isendrecv"])
def test_a_bad_receive_sends_nothing(rig: Rig, method: str) -> None:
    call, array = getattr(rig.comm, method), rig.of(rig.rank, LARGE)
    host = np.zeros(LARGE, np.int32)
    host.flags.writeable = False
    for buffer, error in ((host, BufferError), (3, TypeError), ([np.zeros(2), 5], InvalidUsageError)):
        with pytest.raises(error, match="recvbuf"):
            call(array, rig.right, 1, buffer, rig.left, 1)
    for source, tag in ((rig.size, 1), (rig.left, -7)):
        with pytest.raises(MPI.Exception):
            call(array, rig.right, 1, rig.empty(LARGE), source, tag)
    with pytest.raises(InvalidUsageError, match="sendbuf"):
        call([np.zeros(2), 5], rig.right, 1, rig.empty(LARGE), rig.left, 1)
    rig.comm.Barrier()
    assert not rig.comm.Iprobe(rig.left)
