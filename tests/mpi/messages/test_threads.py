"""Threads that share a stream, between processes whose devices are threads: the tests hold them at the bad moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.api import point_to_point
from tests.helpers.fakes.message_devices import DeviceArray
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.rigs.message_rigs import LARGE, Rig, content, same

COUNT = 50


def settle(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(1e-3)


def warm_up(rig: Rig) -> None:
    """Let the next messages take the fast path, which needs places of earlier messages that are over. Collective."""
    for _ in range(3):
        rig.comm.Send(rig.of(rig.rank, COUNT), rig.right)
        rig.comm.Recv(rig.empty(COUNT), rig.left)
    settle(rig.comm._messages.rendezvous.outbox.is_drained)


class Held:
    """The next sends of device arrays. Their blocking sends of MPI return late: when the test lets them."""

    def __init__(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        messages = rig.comm._messages
        self._send = messages.send
        self.told, self.may_return = threading.Event(), threading.Event()
        monkeypatch.setattr(messages, "send", lambda by_mpi, *sent: self._send(partial(self._late, by_mpi), *sent))

    def _late(self, by_mpi: Callable[..., None], *arguments: Any) -> None:
        by_mpi(*arguments)
        self.told.set()
        assert self.may_return.wait(HANG_S)


@pytest.mark.parametrize("first", ["the sender", "the receiver"])
@pytest.mark.parametrize("method", ["Send", "Rsend"])
def test_a_wait_does_not_come_between_a_message_and_its_copy(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, first: str, method: str
) -> None:
    """On all ranks at once a thread has told MPI of its message, and another one waits for the left rank's."""
    received = rig.empty(COUNT)
    with ThreadPoolExecutor(1) as other:
        if first == "the sender":
            other.submit(warm_up, rig).result(HANG_S)
        else:
            warm_up(rig)
        held = Held(rig, monkeypatch)
        sending = other.submit(getattr(rig.comm, method), rig.of(rig.rank, COUNT, 5), rig.right, 3)
        assert held.told.wait(HANG_S)
        rig.comm.Recv(received, rig.left, 3)
        same(received, content(rig.left, COUNT, 5))
        held.may_return.set()
        sending.result(HANG_S)
    rig.device.synchronize()
    rig.device.check()


def test_a_collective_does_not_come_between_a_message_and_its_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 has told MPI of its message. Another thread of it enqueues a collective, and so does rank 1 later."""
    if rig.size == 1:
        pytest.skip("one rank has no others to wait for")
    plain = MPI.Intracomm(rig.comm).Dup()
    with ThreadPoolExecutor(1) as other:
        other.submit(warm_up, rig).result(HANG_S)
        if rig.rank == 0:
            held, all_are_in = Held(rig, monkeypatch), threading.Event()
            sending = other.submit(rig.comm.Send, rig.of(0, COUNT, 5), 1, 3)
            assert held.told.wait(HANG_S)
            rig.device.enqueue(rig.device.stream(None), all_are_in.wait)  # the collective
            plain.Barrier()
            all_are_in.set()
            held.may_return.set()
            sending.result(HANG_S)
        else:
            received = rig.empty(COUNT)
            if rig.rank == 1:
                other.submit(rig.comm.Recv, received, 0, 3).result(HANG_S)
            is_in = threading.Event()
            other.submit(lambda: rig.device.enqueue(rig.device.stream(None), is_in.set)).result(HANG_S)
            assert is_in.wait(HANG_S)
            plain.Barrier()
            if rig.rank == 1:
                same(received, content(0, COUNT, 5))
    plain.Free()


def test_a_refused_send_is_taken_back_whoever_has_enqueued_its_copy(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        told.set()
        assert may_raise.wait(HANG_S)
        raise MPI.Exception(MPI.ERR_TAG)

    with ThreadPoolExecutor(1) as other, monkeypatch.context() as patch:
        other.submit(warm_up, rig).result(HANG_S)
        patch.setattr(point_to_point, "_send", refuse)
        for comes in (False, True):
            told, may_raise = threading.Event(), threading.Event()
            sending = other.submit(rig.comm.Send, rig.of(rig.rank, COUNT, 6), rig.right)
            assert told.wait(HANG_S)
            if comes:
                rig.device.stream(None)  # of this thread
            may_raise.set()
            with pytest.raises(MPI.Exception):
                sending.result(HANG_S)
    for number in range(100):  # the places are free again
        received = rig.empty(COUNT)
        rig.comm.Sendrecv(rig.of(rig.rank, COUNT, number), rig.right, 0, received, rig.left, 0)
        same(received, content(rig.left, COUNT, number))


def receive(rig: Rig, call: str, received: DeviceArray) -> None:
    if call == "Sendrecv":
        rig.comm.Sendrecv(rig.empty(1), MPI.PROC_NULL, 0, received, 0, 9)
    elif call == "Mprobe":
        rig.comm.Mprobe(0, 9).Recv(received)
    else:
        rig.comm.Recv(received, 0, 9)


@pytest.mark.parametrize("count", [COUNT, 2 * LARGE])
@pytest.mark.parametrize("call", ["Recv", "Sendrecv", "Mprobe"])
def test_a_receive_of_a_listener_does_not_hold_up_a_collective(rig: Rig, call: str, count: int) -> None:
    """Rank 0's message follows its collective, which the other ranks enqueue after their listeners have matched."""
    if rig.size == 1:
        pytest.skip("one rank has no others to wait for")
    warm_up(rig)
    plain = MPI.Intracomm(rig.comm).Dup()
    with ThreadPoolExecutor(1) as listener:
        if rig.rank == 0:
            all_are_in = threading.Event()
            rig.device.enqueue(rig.device.stream(None), all_are_in.wait)  # the collective
            requests = [rig.comm.Isend(rig.of(0, count, rank), rank, 9) for rank in range(1, rig.size)]
            plain.Barrier()
            all_are_in.set()
            MPI.Request.Waitall(requests)
        else:
            waits, is_in, received = rig.device.waits, threading.Event(), rig.empty(count)
            heard = listener.submit(receive, rig, call, received)
            settle(lambda: rig.device.waits > waits)
            rig.device.enqueue(rig.device.stream(None), is_in.set)  # the collective
            assert is_in.wait(HANG_S)
            plain.Barrier()
            heard.result(HANG_S)
            same(received, content(0, count, rig.rank))
    plain.Free()
