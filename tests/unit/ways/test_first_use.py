"""What is made at its first use is made once, also if a second thread needs it in the meantime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm.cluster.placement import Placement
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.messages.matched import Matched, UnexpectedQueue
from mpicomm.messages.rendezvous import MessageMemory
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.session import Session
from mpicomm.ways.engines import Engines
from tests.helpers.fakes.message_devices import ThreadDevice
from tests.helpers.jobs.pace import HANG_S


class Second:
    """A second thread, which calls ``act`` while the first one is in `meanwhile`."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.results: list[Any] = []
        self._thread = threading.Thread(target=lambda: self.results.append(act()))

    def meanwhile(self) -> None:
        """Let the second thread begin its call. It waits here for the first one, or is over soon without a lock."""
        if threading.current_thread() is not self._thread and not self._thread.ident:
            self._thread.start()
            self._thread.join(0.2)

    def joined(self) -> Any:
        self._thread.join(HANG_S)
        return self.results[0]


@pytest.fixture
def placement() -> Placement:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        was = comm._session.placement
    return Placement([replace(place, device=0, handle="ipc") for place in was.places], was.rank)


def test_a_communicator_has_one_device(placement: Placement, monkeypatch: pytest.MonkeyPatch) -> None:
    def create_backend() -> Any:
        second.meanwhile()
        return SimpleNamespace()

    monkeypatch.setattr(placement, "create_backend", create_backend)
    session = Session(MPI.COMM_SELF, placement)
    second = Second(lambda: session.gpu("Recv"))
    assert session.gpu("Send") is second.joined()


def test_a_communicator_has_one_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, device = MessageMemory(5.0, bytes(32), None), ThreadDevice(0, 5.0)
    gpu, steps = cast(GpuBackend, device), device.message_steps
    second = Second(lambda: memory.rendezvous(gpu))

    def message_steps() -> Any:
        second.meanwhile()
        return steps()

    monkeypatch.setattr(device, "message_steps", message_steps)
    assert memory.rendezvous(gpu) is second.joined()
    memory.give_back()
    device.close()


def test_a_communicator_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(channel=None, set_up=lambda what: None)
    engines = Engines(cast(Session, session))
    second = Second(lambda: engines.on_gpu("Allreduce"))

    def make(session: object, operation: str) -> Any:
        second.meanwhile()
        return SimpleNamespace()

    monkeypatch.setattr(engines, "_make_on_gpu", make)
    assert engines.on_gpu("Send") is second.joined()


def test_a_communicator_frees_all_that_it_keeps(placement: Placement) -> None:
    """The sum of what it keeps and a further member is not made at once."""

    class Kept(tuple[Any, ...]):
        def __add__(self, other: Any) -> Any:
            second.meanwhile()
            return Kept((*self, *other))

    for keeps, method in (("_shared", "keep"), ("_beside", "keep_beside")):
        session = Session(MPI.COMM_SELF, placement)
        keep = getattr(session, method)
        second = Second(lambda keep=keep: keep("second"))  # type: ignore[misc]
        setattr(session, keeps, Kept())
        keep("first")
        second.joined()
        assert set(getattr(session, keeps)) == {"first", "second"}


@pytest.fixture
def queue() -> Iterator[UnexpectedQueue]:
    """A queue that a probe has filled with a message of tag 1. A message of tag 2 is in MPI."""
    comm = mpicomm.Communicator(MPI.COMM_SELF, device="cpu")
    data = np.zeros(HEADER_NBYTES, np.uint8)
    sends = [comm.Isend(data, 0, tag) for tag in (1, 2)]
    queue = UnexpectedQueue(None, comm, bytes(32))
    queue.probe(0, 1, None, wait=True)
    comm.Probe(0, 2)
    yield queue
    for matched in queue.kept:
        matched.recv_into(data, MPI.Status())
    MPI.Request.Waitall(sends)
    comm.Free()


def test_two_threads_take_two_messages_of_probes(queue: UnexpectedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    find, second = queue._find, Second(lambda: queue.take(0, MPI.ANY_TAG))

    def find_slowly(source: int, tag: int) -> Any:
        found = find(source, tag)
        second.meanwhile()
        return found

    queue.probe(0, 2, None, wait=True)
    monkeypatch.setattr(queue, "_find", find_slowly)
    taken: list[Any] = [queue.take(0, MPI.ANY_TAG), second.joined()]
    assert [each.tag for each in taken] == [1, 2]
    queue.kept += taken


def test_a_receive_beside_a_probe_loses_no_message(queue: UnexpectedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    of, second = Matched.of, Second(lambda: queue.take(0, 1))

    def of_slowly(*arguments: Any) -> Matched:
        second.meanwhile()
        return of(*arguments)

    monkeypatch.setattr(Matched, "of", of_slowly)
    assert queue.probe(0, 2, None, wait=False)
    assert second.joined().tag == 1
    queue.kept.append(second.joined())
