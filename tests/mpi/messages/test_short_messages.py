"""Messages of device arrays that are shorter than their descriptions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from tests.helpers.rigs.message_rigs import Rig, content, same

COUNTS = (1, 2, 7, HEADER_NBYTES // 4 - 1, HEADER_NBYTES // 4)


@pytest.mark.parametrize("count", COUNTS)
def test_between_devices(rig: Rig, count: int) -> None:
    for number in range(200):  # beyond the first look for places that are free
        received, status = rig.empty(count + 1), MPI.Status()
        if number % 2:
            rig.comm.Sendrecv(rig.of(rig.rank, count, number), rig.right, 3, received, rig.left, 3, status)
        else:
            rig.comm.Send(rig.of(rig.rank, count, number), rig.right, 3)
            rig.comm.Recv(received, MPI.ANY_SOURCE, MPI.ANY_TAG, status)
        assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 3, count)
        if number % 20 < 3:
            same(received, content(rig.left, count, number))
            assert received.get()[count] == 0
    assert rig.device.host_copies == 0
    assert rig.device.allocated < 8 << 20


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


def test_probes_tell_the_length_of_the_data(rig: Rig) -> None:
    request = rig.comm.Isend(rig.of(rig.rank, 3), rig.right, 9)
    status = MPI.Status()
    rig.comm.Probe(rig.left, 9, status)
    assert (status.source, status.tag, status.Get_count(MPI.INT32_T)) == (rig.left, 9, 3)
    received = rig.empty(3)
    rig.comm.Recv(received, rig.left, 9)
    same(received, content(rig.left, 3))
    request.Wait()


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
