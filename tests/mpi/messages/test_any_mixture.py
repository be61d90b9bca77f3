"""Every kind of buffer meets every kind, in every call, between processes whose devices are threads."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.rigs.buffered_sends import room_for_buffered_sends
from tests.helpers.rigs.message_rigs import LARGE, Array, Rig, content

KINDS = ("device", "host", "derived on device", "derived on host")
# Empty, shorter than a header, as long as a header, at the bounds of what kernels copy, in several pieces.
COUNTS = (0, 1, HEADER_NBYTES // 4 - 1, HEADER_NBYTES // 4, LARGE // 4, LARGE // 4 + 1, 5 * LARGE + 3)
SENDS = ("Isend", "Issend", "Ibsend")
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


@pytest.fixture(autouse=True)
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


@pytest.mark.parametrize("way", [*MATCHED, *POSTED, *TOGETHER])
@pytest.mark.parametrize("count", COUNTS)
def test_any_buffer_is_received_into_any_buffer(rig: Rig, way: str, count: int) -> None:
    comm, kinds = rig.comm, KINDS if count <= LARGE else KINDS[:2]  # doubles pack element by element
    for turn, (source, target) in enumerate(itertools.product(kinds, kinds)):
        given, tag = content(rig.rank, count, turn), turn
        sent, received = Buffer(rig, source, given), Buffer(rig, target, np.empty(0, np.int32), spare=count + SPARE)
        request, status = MPI.REQUEST_NULL, MPI.Status()
        if way in MATCHED:
            request = started(rig, SENDS[turn % len(SENDS)], sent.spec, tag)
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
