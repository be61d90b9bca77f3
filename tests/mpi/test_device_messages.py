"""Messages of device arrays that stay on the devices, between processes whose devices are threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.backend.base import Backend
from mpicomm.log import logger
from mpicomm.messages import outgoing
from mpicomm.messages.description import NBYTES, THRESHOLD_NBYTES
from tests.helpers.communicators import communicator
from tests.helpers.leaks import nothing_leaks
from tests.helpers.message_devices import DeviceArray, ThreadDevice, on_threads, small_messages, take_for_gpu

Array = npt.NDArray[Any]

LARGE = THRESHOLD_NBYTES  # int32: four times the threshold
SIZES = (0, 1, NBYTES // 4, THRESHOLD_NBYTES // 4, THRESHOLD_NBYTES // 4 + 1, LARGE, 5 * LARGE + 3)


class Rig:
    """A communicator whose device is made of threads, and its neighbours."""

    def __init__(self, comm: mpicomm.Communicator, device: ThreadDevice) -> None:
        self.comm, self.device = comm, device
        self.rank, self.size = comm.rank, comm.size
        self.right, self.left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    def empty(self, count: int, dtype: Any = np.int32) -> DeviceArray:
        return DeviceArray(self.device, np.zeros(count, dtype))

    def of(self, rank: int, count: int, key: int = 0) -> DeviceArray:
        return DeviceArray(self.device, content(rank, count, key))


def content(rank: int, count: int, key: int = 0) -> Array:
    return np.random.default_rng([rank, key]).integers(-(2**31), 2**31, count).astype(np.int32)


@pytest.fixture(scope="module")
def parent() -> Iterator[mpicomm.Communicator]:
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("a rank that sends to itself before it receives waits for ever in some MPIs")
    with communicator("cpu") as comm:
        yield comm


@pytest.fixture
def rig(parent: mpicomm.Communicator) -> Iterator[Rig]:
    with nothing_leaks(), small_messages():
        comm, device = on_threads(parent)
        yield Rig(comm, device)
        comm.Free()
        assert device.closed


def same(array: DeviceArray, expected: Array) -> None:
    assert array.get()[: expected.size].tobytes() == expected.tobytes()


@pytest.mark.parametrize("method", ["Send", "Isend", "Ssend", "Issend"])
def test_ring(rig: Rig, method: str) -> None:
    for tag, count in enumerate(SIZES):
        received, status = rig.empty(count + 5), MPI.Status()
        request = rig.comm.Irecv(received, rig.left, tag)
        sent = getattr(rig.comm, method)(rig.of(rig.rank, count, tag), rig.right, tag)
        if sent is not None:
            sent.Wait()
        request.Wait(status)
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, tag, count)
        same(received, content(rig.left, count, tag))
        assert not received.get()[count:].any()


def test_blocking_calls_leave_the_order_to_the_stream(rig: Rig) -> None:
    array, received = rig.of(rig.rank, LARGE), rig.empty(LARGE)
    for number in range(4):
        array.fill(100 * number + rig.rank)
        rig.comm.Send(array, rig.right, number)
        array.fill(-1)  # later work: what was sent is not to know
        status = MPI.Status()
        rig.comm.Recv(received, rig.left, number, status)
        assert status.Get_count(MPI.INT32_T) == LARGE
        copy = rig.empty(LARGE)
        rig.device.copy(copy.memory.ctypes.data, received.memory.ctypes.data, received.memory.nbytes, 0)
        same(copy, np.full(LARGE, 100 * number + rig.left, np.int32))
    assert rig.device.allocated > 0


def test_streams_of_the_caller(rig: Rig) -> None:
    array, received = rig.empty(LARGE), rig.empty(LARGE)
    array.fill(rig.rank, stream=7)
    request = rig.comm.Isend(array, rig.right, stream=7)
    rig.comm.Recv(received, rig.left, stream=8)
    copy = rig.empty(LARGE)
    rig.device.copy(copy.memory.ctypes.data, received.memory.ctypes.data, received.memory.nbytes, 8)
    request.Wait()
    same(copy, np.full(LARGE, rig.left, np.int32))


@pytest.mark.parametrize("count", [100, LARGE])
def test_sendrecv_and_its_kin(rig: Rig, count: int) -> None:
    status = MPI.Status()
    sent, received = rig.of(rig.rank, count), rig.empty(count)
    rig.comm.Sendrecv(sent, rig.right, 1, received, rig.left, MPI.ANY_TAG, status)
    assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 1, count)
    sent.fill(0)  # after what was sent
    same(received, content(rig.left, count))
    received = rig.empty(count)
    rig.comm.Isendrecv(rig.of(rig.rank, count), rig.right, 2, received, rig.left, 2).Wait(status)
    assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 2, count)
    same(received, content(rig.left, count))
    replaced = rig.of(rig.rank, count)
    rig.comm.Sendrecv_replace(replaced, rig.right, 3, rig.left, 3, status)
    assert status.Get_count(MPI.INT32_T) == count
    same(replaced, content(rig.left, count))


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


def test_any_source(rig: Rig) -> None:
    for peer in range(rig.size):
        rig.comm.Send(rig.of(rig.rank, LARGE + rig.rank), peer, 5)
    seen = set()
    for _ in range(rig.size):
        received, status = rig.empty(LARGE + rig.size), MPI.Status()
        rig.comm.Recv(received, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        assert status.Get_count(MPI.INT32_T) == LARGE + status.source
        same(received, content(status.source, LARGE + status.source))
        seen.add(status.source)
    assert seen == set(range(rig.size))


def test_a_message_to_oneself(rig: Rig) -> None:
    received = rig.empty(LARGE)
    rig.comm.Send(rig.of(rig.rank, LARGE), rig.rank)
    rig.comm.Recv(received, rig.rank)
    same(received, content(rig.rank, LARGE))
    assert not rig.device.opened


def test_memory_is_used_again_only_when_its_receiver_is_done(parent: mpicomm.Communicator) -> None:
    with nothing_leaks(), small_messages():
        comm, device = on_threads(parent, total_nbytes=64 << 21)  # room for 2 MiB: 7 messages
        rig = Rig(comm, device)
        received = rig.empty(2 * LARGE)
        for number in range(60):
            rig.comm.Send(rig.of(rig.rank, 2 * LARGE, number), rig.right)
            rig.comm.Recv(received, rig.left)
            copy = rig.empty(2 * LARGE)
            device.copy(copy.memory.ctypes.data, received.memory.ctypes.data, received.memory.nbytes, 0)
            same(copy, content(rig.left, 2 * LARGE, number)) if number % 7 == 0 else None
        assert device.allocated == (2 << 20) + 16384  # words and blocks
        assert max(device.opened.values(), default=1) == 1
        comm.Free()


def test_without_room_messages_go_through_the_host(
    parent: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outgoing, "_said", set())
    with small_messages():
        comm, device = on_threads(parent, total_nbytes=64 << 21)
        rig = Rig(comm, device)
        lines = warnings_of(monkeypatch)
        sends = [rig.comm.Isend(rig.of(rig.rank, 2 * LARGE, number), rig.right) for number in range(12)]
        comm.Barrier()
        for number in range(12):
            received = rig.empty(2 * LARGE)
            rig.comm.Recv(received, rig.left)
            same(received, content(rig.left, 2 * LARGE, number))
        MPI.Request.Waitall(sends)
        assert len(lines) == 1 and "not received yet" in lines[0], lines
        comm.Free()


def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *arguments: lines.append(text % arguments))
    return lines


@pytest.mark.parametrize("why", ["device", "handle"])
def test_without_memory_messages_go_through_the_host(
    parent: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.setattr(outgoing, "_said", set())
    lines = warnings_of(monkeypatch)
    comm, device = on_threads(parent, "fd" if why == "handle" else "ipc")
    device.refuses = "no memory is left"
    rig = Rig(comm, device)
    received, status = rig.empty(LARGE), MPI.Status()
    for _ in range(2):
        rig.comm.Sendrecv(rig.of(rig.rank, LARGE), rig.right, 0, received, rig.left, 0, status)
        same(received, content(rig.left, LARGE))
        assert status.Get_count(MPI.INT32_T) == LARGE
    assert len(lines) == 1 and ("no memory is left" if why == "device" else "'fd'") in lines[0]
    comm.Free()


@pytest.mark.parametrize("to_host", [False, True])
def test_a_truncated_message_is_an_error_and_leaves_its_place(rig: Rig, to_host: bool) -> None:
    def short() -> Any:
        return np.zeros(LARGE - 1, np.int32) if to_host else rig.empty(LARGE - 1)

    for count in (LARGE, 5 * LARGE):
        rig.comm.Send(rig.of(rig.rank, count), rig.right)
        with pytest.raises(MPI.Exception, match=r"(?i)truncate"):
            rig.comm.Recv(short(), rig.left)
        request = rig.comm.Irecv(short(), rig.left)
        rig.comm.Send(rig.of(rig.rank, count), rig.right)
        with pytest.raises(MPI.Exception, match=r"(?i)truncate"):
            request.Wait()
        request = rig.comm.Irecv(short(), rig.left)
        rig.comm.Send(rig.of(rig.rank, count), rig.right)
        with pytest.raises(MPI.Exception):
            MPI.Request.Waitall([request])
    rig.comm.Barrier()
    rig.device.synchronize()
    rig.comm.Barrier()
    transfers = rig.comm._messages.memory._transfers
    assert transfers is not None and transfers.is_taken()


def test_the_place_of_a_truncated_message_is_kept_until_it_has_come(parent: mpicomm.Communicator) -> None:
    comm, device = on_threads(parent, total_nbytes=64 << 21)  # room for one
    rig, count = Rig(comm, device), 12 * LARGE
    device.enqueue(7, lambda: time.sleep(0.3))
    first = comm.Isend(rig.of(rig.rank, count), rig.right, stream=7)
    with pytest.raises(MPI.Exception, match=r"(?i)truncate"):
        comm.Recv(rig.empty(count - 1), rig.left)
    time.sleep(0.05)
    comm.Barrier()
    second = comm.Isend(rig.of(rig.rank, count, 1), rig.right, stream=8)
    device.enqueue(9, lambda: time.sleep(0.6))  # longer than the first is late
    received = rig.empty(count)
    comm.Recv(received, rig.left, stream=9)
    MPI.Request.Waitall([first, second])
    same(received, content(rig.left, count, 1))
    comm.Free()


def test_a_receive_is_cancelled(rig: Rig) -> None:
    for array in (np.zeros(LARGE, np.int32), rig.empty(LARGE)):
        request, status = rig.comm.Irecv(array, rig.left, 77), MPI.Status()
        request.Cancel()
        request.Wait(status)
        assert status.Is_cancelled()
    received = rig.empty(LARGE)
    rig.comm.Sendrecv(rig.of(rig.rank, LARGE), rig.right, 77, received, rig.left, 77)
    same(received, content(rig.left, LARGE))


RECEIVES = ["Recv", "Irecv", "Waitall", "Sendrecv", "Sendrecv_replace", "Isendrecv", "Isendrecv_replace", "Recv_init"]
MATCHED = ["Mprobe", "Improbe", "Mprobe Irecv"]


@pytest.mark.parametrize("way", [*RECEIVES, *MATCHED])
@pytest.mark.parametrize("count", [NBYTES // 4, LARGE, 5 * LARGE + 3])
def test_a_host_array_receives_what_a_device_array_sends(rig: Rig, way: str, count: int) -> None:
    """Also what has the length of a description and is none."""
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


def test_a_device_array_receives_what_a_host_array_sends(rig: Rig) -> None:
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
    sends.append(comm.Isend(np.full(NBYTES, 9, np.uint8), rig.right, 4))
    comm.Barrier()
    for _ in range(2):
        assert comm.Iprobe(rig.left, 2, status)  # behind two others
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 2, LARGE + 2)
        comm.Probe(rig.left, 4, status)
        assert (status.source, status.tag, status.Get_count(MPI.BYTE)) == (rig.left, 4, NBYTES)
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
    last = np.zeros(NBYTES, np.uint8)
    comm.Recv(last, rig.left, 4, status)
    assert (last == 9).all() and (status.source, status.Get_count(MPI.BYTE)) == (rig.left, NBYTES)
    MPI.Request.Waitall(sends)
    assert not comm.Iprobe()


def test_python_objects_of_the_length_of_a_description(rig: Rig) -> None:
    sent = next(b"x" * n for n in range(NBYTES) if len(MPI.pickle.dumps(b"x" * n)) == NBYTES)
    takes: list[Callable[[], object]] = [
        lambda: rig.comm.recv(),
        lambda: rig.comm.irecv().wait(),
        lambda: rig.comm.mprobe().recv(),
    ]
    for take in takes:
        request, status = rig.comm.isend(sent, rig.right), MPI.Status()
        rig.comm.Probe(status=status)
        assert status.Get_count(MPI.BYTE) == NBYTES
        assert take() == sent
        request.wait()


def test_capture_is_refused(rig: Rig) -> None:
    rig.device.capturing = True
    for call in (
        lambda: rig.comm.Send(rig.empty(LARGE), MPI.PROC_NULL),
        lambda: rig.comm.Isend(rig.empty(1), MPI.PROC_NULL),
        lambda: rig.comm.Recv(rig.empty(LARGE), MPI.PROC_NULL),
        lambda: rig.comm.Irecv(rig.empty(LARGE), MPI.PROC_NULL),
    ):
        with pytest.raises(InvalidUsageError, match="cannot be part of a CUDA graph"):
            call()
    rig.device.capturing = False
    rig.comm.Recv(rig.empty(LARGE), MPI.PROC_NULL)
    rig.comm.Sendrecv(rig.empty(LARGE), MPI.PROC_NULL, source=MPI.PROC_NULL)


def test_what_mpi_refuses_leaves_its_place(rig: Rig) -> None:
    with pytest.raises(MPI.Exception):
        rig.comm.Send(rig.empty(LARGE), rig.right, tag=-7)
    rig.device.synchronize()
    transfers = rig.comm._messages.memory._transfers
    assert transfers is not None and transfers.is_taken()


def test_a_communicator_made_from_another_has_a_secret_of_its_own(rig: Rig) -> None:
    half = rig.comm.Split(rig.rank % 2)
    assert isinstance(half, mpicomm.Communicator)
    part = Rig(half, take_for_gpu(half))
    assert (half._messages._secret != rig.comm._messages._secret) == (rig.size > 1)
    received = part.empty(LARGE)
    half.Sendrecv(part.of(rig.rank, LARGE), part.right, 0, received, part.left, 0)
    same(received, content((rig.rank - 2) % rig.size, LARGE))
    half.Free()


def test_a_domain_takes_over_the_device_and_gives_back_what_messages_took(parent: mpicomm.Communicator) -> None:
    with nothing_leaks():
        comm, device = on_threads(parent)
        rig = Rig(comm, device)
        received = rig.empty(LARGE)
        rig.comm.Sendrecv(rig.of(rig.rank, LARGE), rig.right, 0, received, rig.left, 0)
        assert comm._set_up("test").backend is cast(Backend, device)
        rig.comm.Sendrecv(rig.of(rig.rank, LARGE, 1), rig.right, 0, received, rig.left, 0)
        comm.check()
        same(received, content(rig.left, LARGE, 1))
        comm.Free()
        assert device.closed


def test_a_sender_whose_device_stops_is_named(parent: mpicomm.Communicator) -> None:
    for way in ("Recv", "Irecv", "host"):
        comm = parent.Dup()
        device = take_for_gpu(comm)
        device._timeout_s = 0.3 if comm.rank == 1 else 20
        rig = Rig(comm, device)
        if comm.rank == 0:
            held = rig.empty(1)
            device.enqueue(0, lambda: time.sleep(1.0))  # as if it had died: what it sends does not come
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
