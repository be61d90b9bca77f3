"""Messages that are probed, matched, too long or refused, of devices and of the host; the devices are threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from tests.helpers.fakes import fake_driver
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.buffered_sends import room_for_buffered_sends
from tests.helpers.rigs.message_rigs import LARGE, Array, Rig, content, same


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


@pytest.mark.parametrize("sender", ["host", "device"])
@pytest.mark.parametrize("receiver", ["host", "device", "probed"])
def test_a_message_that_is_too_long(rig: Rig, sender: str, receiver: str) -> None:
    received: Any = np.zeros(8, np.int32) if receiver == "host" else rig.empty(8)
    room = received[:3] if receiver == "host" else [received, 3, MPI.INT32_T]
    for count in (4, HEADER_NBYTES // 4):
        request = rig.comm.Isend(content(0, count) if sender == "host" else rig.of(0, count), rig.right)
        with pytest.raises(MPI.Exception) as raised:
            if receiver == "probed":
                rig.comm.Mprobe(rig.left).Recv(room)
            else:
                rig.comm.Recv(room, rig.left)
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE
        request.Wait()
    found = received if receiver == "host" else received.get()
    assert not found[3:].any()


@pytest.mark.parametrize("method", ["Bsend", "Ibsend"])
def test_the_buffer_of_a_buffered_send_has_room_for_only_the_data(rig: Rig, method: str) -> None:
    buffer = bytearray(3 * 4 + MPI.BSEND_OVERHEAD)
    MPI.Attach_buffer(buffer)
    try:
        request = getattr(rig.comm, method)(rig.of(rig.rank, 3), rig.right)
        received = rig.empty(3)
        rig.comm.Recv(received, rig.left)
        same(received, content(rig.left, 3))
        if request is not None:
            request.Wait()
    finally:
        MPI.Detach_buffer()


ELEMENTS = 40


class Foreign:
    """An array in the memory of GPU 1."""

    def __init__(self) -> None:
        self.memory = np.zeros(ELEMENTS, np.int32)
        fake_driver.own(self.memory, 1)
        self.__cuda_array_interface__ = {
            "shape": self.memory.shape,
            "typestr": self.memory.dtype.str,
            "data": (self.memory.ctypes.data, False),
            "version": 3,
        }


@pytest.fixture
def foreign() -> Foreign:
    return Foreign()


def refused(name: str, call: Any, *arguments: Any, **named: Any) -> None:
    with pytest.raises(mpicomm.InvalidUsageError, match=f"{name} is on GPU 1, but this communicator is on GPU 0: copy"):
        call(*arguments, **named)


SENDS = [
    "Send",
    "Ssend",
    "Rsend",
    "Bsend",
    "Isend",
    "Issend",
    "Irsend",
    "Ibsend",
    "Send_init",
    "Ssend_init",
    "Rsend_init",
    "Bsend_init",
]


def test_arrays_of_another_gpu_are_refused(rig: Rig, foreign: Foreign) -> None:
    for method in (*SENDS, "Recv", "Irecv", "Recv_init", "Sendrecv_replace", "Isendrecv_replace"):
        for buffer in (foreign, [foreign, 3, MPI.INT]):
            refused(f"{method}: buf", getattr(rig.comm, method), buffer, rig.right)
    for method, other in itertools.product(
        ("Sendrecv", "Isendrecv"), (rig.empty(ELEMENTS), np.zeros(ELEMENTS, np.int32))
    ):
        refused(f"{method}: sendbuf", getattr(rig.comm, method), foreign, rig.right, 0, other, rig.left)
        refused(f"{method}: recvbuf", getattr(rig.comm, method), other, rig.right, 0, foreign, rig.left)
    for method in ("Psend_init", "Precv_init"):  # which only MPI has
        if hasattr(MPI.Comm, method):
            refused("buf", getattr(rig.comm, method), foreign, 1, rig.right)


def test_a_refused_receive_loses_no_message(rig: Rig, foreign: Foreign) -> None:
    sent = [rig.comm.Isend(rig.of(rig.rank, ELEMENTS, number), rig.right, number) for number in range(3)]
    refused("Recv: buf", rig.comm.Recv, foreign, rig.left, 0)
    message = rig.comm.Mprobe(rig.left, 1)
    refused("Message.Recv: buf", message.Recv, foreign)
    other = rig.comm.Mprobe(rig.left, 2)
    refused("Message.Irecv: buf", other.Irecv, foreign)
    received = [rig.empty(ELEMENTS) for _ in range(3)]
    rig.comm.Recv(received[0], rig.left, 0)
    message.Recv(received[1])
    other.Irecv(received[2]).Wait()
    MPI.Request.Waitall(sent)
    for number, array in enumerate(received):
        same(array, content(rig.left, ELEMENTS, number))


KINDS = ("device", "host", "derived on device", "derived on host")
# Empty, shorter than a header, as long as a header, at the bounds of what kernels copy, in several pieces.
COUNTS = (0, 1, HEADER_NBYTES // 4 - 1, HEADER_NBYTES // 4, LARGE // 4, LARGE // 4 + 1, 5 * LARGE + 3)
STARTED_SENDS = ("Isend", "Issend", "Ibsend")
READY_SENDS = ("Send", "Ssend", "Bsend", "Rsend", "Irsend", "Send_init", "Ssend_init", "Bsend_init", "Rsend_init")
MATCHED = ("Recv", "Mprobe", "Improbe", "Mprobe Irecv")
POSTED = ("Irecv", "Waitall", "Recv_init")
TOGETHER = ("Sendrecv", "Isendrecv")
SPARE = HEADER_NBYTES  # so that a header fits into the rest of a buffer, which a short message must leave alone


class Buffer:
    """Elements of int32 in memory of some kind; those of a derived datatype lie at every second place."""

    def __init__(self, rig: Rig, kind: str, values: Array, *, spare: int = 0) -> None:
        self.count, self.step = values.size, 2 if kind.startswith("derived") else 1
        memory = np.full(self.step * (self.count + spare), -1, np.int32)
        memory[: self.step * self.count : self.step] = values
        self.array: Any = DeviceArray(rig.device, memory) if kind.endswith("device") else memory
        self.datatype = MPI.INT32_T.Create_vector(1, 1, 2).Create_resized(0, 8).Commit()
        self.spec = self.array if self.step == 1 else [self.array, self.count + spare, self.datatype]

    def require(self, values: Array) -> None:
        """Assert that the buffer begins with ``values``, and that all other elements are as before."""
        memory = self.array.get() if isinstance(self.array, DeviceArray) else self.array
        expected = np.full(memory.size, -1, np.int32)
        expected[: self.step * values.size : self.step] = values
        assert np.array_equal(memory, expected)


@pytest.fixture
def buffer_of_mpi(rig: Rig) -> Iterator[None]:
    with room_for_buffered_sends(rig.comm, 16 << 20):
        yield


def started(rig: Rig, method: str, spec: Any, tag: int) -> MPI.Request:
    """Send to the next rank. The request is complete when the message is sent."""
    request = getattr(rig.comm, method)(spec, rig.right, tag)
    if method.endswith("_init"):
        request.Start()
    return MPI.REQUEST_NULL if request is None else request


def receive(rig: Rig, way: str, spec: Any, tag: int) -> MPI.Status:
    """Receive from the rank before, as one call or with a probe."""
    status, probed = MPI.Status(), MPI.Status()
    if way == "Recv":
        rig.comm.Recv(spec, rig.left, tag, status)
        return status
    message = None
    while message is None:
        message = getattr(rig.comm, way.split()[0])(rig.left, MPI.ANY_TAG, probed)
    if way.endswith("Irecv"):
        message.Irecv(spec).Wait(status)
    else:
        message.Recv(spec, status)
    assert message == MPI.MESSAGE_NULL
    assert (probed.source, probed.tag) == (rig.left, tag)
    assert probed.Get_count(MPI.BYTE) == status.Get_count(MPI.BYTE)
    return status


@pytest.mark.usefixtures("buffer_of_mpi")
@pytest.mark.parametrize("way", [*MATCHED, *POSTED, *TOGETHER])
@pytest.mark.parametrize("count", COUNTS)
def test_any_buffer_is_received_into_any_buffer(rig: Rig, way: str, count: int) -> None:
    comm, kinds = rig.comm, KINDS if count <= LARGE else KINDS[:2]  # doubles pack element by element
    for turn, (source, target) in enumerate(itertools.product(kinds, kinds)):
        given, tag = content(rig.rank, count, turn), turn
        sent, received = Buffer(rig, source, given), Buffer(rig, target, np.empty(0, np.int32), spare=count + SPARE)
        request, status = MPI.REQUEST_NULL, MPI.Status()
        if way in MATCHED:
            request = started(rig, STARTED_SENDS[turn % len(STARTED_SENDS)], sent.spec, tag)
            status = receive(rig, way, received.spec, tag)
        elif way in POSTED:
            posted = getattr(comm, "Irecv" if way == "Waitall" else way)(received.spec, rig.left, tag)
            if way == "Recv_init":
                posted.Start()
            MPI.Intracomm.Barrier(comm)  # some sends need a receive that is posted
            request = started(rig, READY_SENDS[turn % len(READY_SENDS)], sent.spec, tag)
            if way == "Waitall":
                statuses = [status]
                MPI.Request.Waitall([posted], statuses)
                status = statuses[0]
            else:
                posted.Wait(status)
            if way == "Recv_init":
                posted.Free()
        else:
            both = getattr(comm, way)(sent.spec, rig.right, tag, received.spec, rig.left, tag)
            if both is not None:
                both.Wait(status)
        if way != "Sendrecv":
            assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, tag, count)
        request.Wait()
        if request != MPI.REQUEST_NULL:
            request.Free()
        received.require(content(rig.left, count, turn))


def receive_array(rig: Rig, way: str, array: Array, tag: int, sent: Any) -> MPI.Status:
    """Send to the next rank, and receive from the rank before by one of the ways to complete a call."""
    comm, status = rig.comm, MPI.Status()
    if way == "Sendrecv":
        comm.Sendrecv(sent, rig.right, tag, array, rig.left, tag, status)
        return status
    request = comm.Isend(sent, rig.right, tag)
    try:
        if way == "Recv":
            comm.Recv(array, rig.left, tag, status)
            return status
        posted, statuses = comm.Irecv(array, rig.left, tag), [status]
        assert posted and "active" in repr(posted)
        if way == "Wait":
            posted.Wait(status)
        elif way == "Test":
            while not posted.Test(status):
                pass
        elif way == "Waitall":
            MPI.Request.Waitall([posted], statuses)
        else:
            while not posted.Get_status():
                pass
            assert MPI.Request.Waitany([MPI.REQUEST_NULL, posted], status) == 1
        assert not posted
        return statuses[0]
    finally:
        request.Wait()


@pytest.mark.parametrize("way", ["Recv", "Sendrecv", "Wait", "Test", "Waitall", "Waitany"])
@pytest.mark.parametrize("source", ["host", "device"])
@pytest.mark.parametrize("room", [4, HEADER_NBYTES // 4, HEADER_NBYTES])
def test_an_array_takes_messages_up_to_its_length(rig: Rig, way: str, source: str, room: int) -> None:
    for tag, count in enumerate((0, 3, room)):
        received = np.full(room, -1, np.int32)
        sent = Buffer(rig, source, content(rig.rank, count, tag))
        status = receive_array(rig, way, received, tag, sent.spec)
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, tag, count)
        assert received.tolist() == [*content(rig.left, count, tag).tolist(), *[-1] * (room - count)]
    sent = Buffer(rig, source, content(rig.rank, room + 1, 9))
    with pytest.raises(MPI.Exception) as raised:
        receive_array(rig, way, received, 9, sent.spec)
    if way not in ("Waitall", "Waitany"):  # MPI names only that the status has an error
        assert raised.value.Get_error_class() == MPI.ERR_TRUNCATE


@pytest.mark.usefixtures("buffer_of_mpi")
@pytest.mark.parametrize("method", ["Sendrecv_replace", "Isendrecv_replace"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_received_message_replaces_the_sent_one(rig: Rig, method: str, kind: str) -> None:
    for tag, count in enumerate(COUNTS[:-1] if kind.startswith("derived") else COUNTS):
        buffer, status = Buffer(rig, kind, content(rig.rank, count, tag)), MPI.Status()
        call: Callable[..., Any] = getattr(rig.comm, method)
        if method == "Sendrecv_replace":
            call(buffer.spec, rig.right, tag, rig.left, tag, status)
        else:
            call(buffer.spec, rig.right, tag, rig.left, tag).Wait(status)
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, tag, count)
        buffer.require(content(rig.left, count, tag))
