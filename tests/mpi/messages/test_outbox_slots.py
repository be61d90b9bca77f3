"""The slots of messages in the outbox, between processes whose devices are threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.log import logger
from mpicomm.messages.in_flight import DONE
from mpicomm.messages.outbox import MEMORY_DIVISOR
from tests.helpers.rigs.message_rigs import LARGE, Rig, content, on_threads, rig_on, same

SINGLE = 12 * LARGE


@pytest.fixture
def single(parent: mpicomm.Communicator) -> Iterator[Rig]:
    """A rig whose outbox has room for a single message of `SINGLE` elements."""
    with rig_on(parent, total_nbytes=MEMORY_DIVISOR << 21) as rig:
        yield rig


def require_slot(rig: Rig) -> None:
    """Let each rank send a message that fits into its outbox only when that is empty. Collective."""
    rig.comm.Barrier()
    rig.device.synchronize()  # the receivers release slots in stream order
    rig.comm.Barrier()
    received = rig.empty(SINGLE)
    rig.comm.Sendrecv(rig.of(rig.rank, SINGLE, 1), rig.right, 0, received, rig.left, 0)
    same(received, content(rig.left, SINGLE, 1))
    assert rig.device.host_copies == 0, "the message went through the host"
    rig.comm.Barrier()
    rig.device.synchronize()
    rig.comm.Barrier()


def test_memory_is_used_again_only_when_its_receiver_is_done(single: Rig) -> None:
    rig, device = single, single.device  # room for 2 MiB: 7 messages
    received = rig.empty(2 * LARGE)
    for number in range(30):
        rig.comm.Send(rig.of(rig.rank, 2 * LARGE, number), rig.right)
        rig.comm.Recv(received, rig.left)
        copy = rig.empty(2 * LARGE)
        device.copy(copy.memory.ctypes.data, received.memory.ctypes.data, received.memory.nbytes, 0)
        same(copy, content(rig.left, 2 * LARGE, number)) if number % 7 == 0 else None
    assert device.allocated == (2 << 20) + 2 * DONE  # the blocks and the words


def test_without_room_messages_go_through_the_host(single: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    count = 2 * LARGE + 1  # no other test has it: the warning names the length, and comes once per process
    rig, lines = single, warnings_of(monkeypatch)
    sends = [rig.comm.Isend(rig.of(rig.rank, count, number), rig.right) for number in range(12)]
    rig.comm.Barrier()
    for number in range(12):
        received = rig.empty(count)
        rig.comm.Recv(received, rig.left)
        same(received, content(rig.left, count, number))
    MPI.Request.Waitall(sends)
    assert len(lines) == 1 and "not received yet" in lines[0], lines


def warnings_of(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(logger, "warning", lambda text, *arguments: lines.append(text % arguments))
    return lines


@pytest.mark.parametrize("why", ["device", "handle"])
def test_without_memory_messages_go_through_the_host(
    parent: mpicomm.Communicator, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
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
@pytest.mark.parametrize("way", ["Recv", "Wait", "Waitall"])
def test_a_truncated_message_is_an_error_and_releases_its_slot(single: Rig, way: str, to_host: bool) -> None:
    rig = single
    short: Any = np.zeros(SINGLE - 1, np.int32) if to_host else rig.empty(SINGLE - 1)
    for _ in range(2):
        request = rig.comm.Irecv(short, rig.left) if way != "Recv" else MPI.REQUEST_NULL
        rig.comm.Send(rig.of(rig.rank, SINGLE), rig.right)
        with pytest.raises(MPI.Exception, match=None if way == "Waitall" else r"(?i)truncate"):
            if way == "Recv":
                rig.comm.Recv(short, rig.left)
            elif way == "Wait":
                request.Wait()
            else:
                MPI.Request.Waitall([request])
        require_slot(rig)


def test_the_slot_of_a_truncated_message_is_kept_until_it_has_come(single: Rig) -> None:
    rig, comm, device, count = single, single.comm, single.device, SINGLE
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


def test_what_mpi_refuses_releases_its_slot(single: Rig) -> None:
    with pytest.raises(MPI.Exception):
        single.comm.Send(single.empty(SINGLE), single.right, tag=-7)
    require_slot(single)
