"""Communicators without ranks: many of them, what is made at first use, signatures, texts, and orders of ranks.

What is made at its first use is made once, also if a second thread needs it in the meantime.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from mpi4py import MPI

import mpicomm
from mpicomm import HandleError
from mpicomm.api.communicator import DistGraphCommunicator
from mpicomm.api.lifetime import Lazy
from mpicomm.api.topologies import edges_of_grid
from mpicomm.cluster.placement import Placement
from mpicomm.collectives.operations import OPERATIONS, Operation
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.dispatch.engines import Engines
from mpicomm.messages.rendezvous import Rendezvous
from mpicomm.messages.rendezvous_header import HEADER_NBYTES
from mpicomm.messages.unexpected import MatchedMessage, UnexpectedQueue
from mpicomm.session import Session
from tests.helpers.fakes.message_devices import ThreadDevice
from tests.helpers.faults.raising import raising
from tests.helpers.jobs.pace import HANG_S
from tests.helpers.rigs.communicators import require_memory_works

MORE_THAN_THERE_IS_ROOM_FOR = 3000
ROOM = 20
ROUNDS = 10 * ROOM


@pytest.fixture
def little_room() -> Iterator[None]:
    """Take nearly all room of MPI's communicators, because mpicomm's take long to fill it."""
    held: list[MPI.Intracomm] = []
    with suppress(MPI.Exception):
        held.extend(MPI.COMM_SELF.Dup() for _ in range(MORE_THAN_THERE_IS_ROOM_FOR))
    for _ in range(ROOM):
        held.pop().Free()
    yield
    for each in held:
        each.Free()


@pytest.mark.usefixtures("little_room")
def test_communicators_of_mpi_are_given_back() -> None:
    for _ in range(ROUNDS):
        with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm, comm.Split() as child:
            child.zeros(1)


@pytest.mark.usefixtures("little_room")
def test_children_that_fail_free_their_communicators() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm, comm.Dup() as child:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Placement, "create_backend", raising(OSError))
            for _ in range(ROUNDS):
                with pytest.raises(HandleError, match="injected"):
                    child.zeros(3)
        require_memory_works(child)


class Owner:
    @Lazy
    def part(self) -> object:
        time.sleep(0.01)  # so that all threads come meanwhile
        return object()


def test_threads_that_come_at_once_get_the_same_part() -> None:
    owner, begin = Owner(), threading.Barrier(8)

    def look(_: int) -> object:
        begin.wait()
        return owner.part

    with ThreadPoolExecutor(8) as pool:
        assert {*pool.map(look, range(8))} == {owner.part} != {Owner().part}


METHODS = [pytest.param(row, name, id=name) for row in OPERATIONS.values() for name in row.methods]


@pytest.mark.parametrize(("row", "name"), METHODS)
def test_a_method_has_mpi4pys_arguments_and_own_ones_by_name_and_a_docstring(row: Operation, name: str) -> None:
    method, theirs = getattr(DistGraphCommunicator, name), getattr(row.mpi_class, name)
    positional, by_name = (
        {each.name: each.default for each in inspect.signature(method).parameters.values() if each.kind is kind}
        for kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    )
    parameters = inspect.signature(theirs).parameters.values()
    expected = [(each.name, each.default) for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert list(positional.items()) == expected
    own: dict[str, object] = {"stream": None, "algorithm": "auto"}
    own |= {"wire_dtype": None} if row.quantizable else {}
    own |= {"order": "auto"} if row.tree else {}
    own |= {"epilogue": None} if row.name == "Allreduce" else {}
    assert by_name == own
    returned = ("None", "MPI.Request", "MPI.Prequest")[row.methods.index(name)]
    assert inspect.signature(method).return_annotation == returned
    assert method.__doc__ and (name == row.name or f"`{row}`" in method.__doc__)


@pytest.mark.parametrize("name", ["send", "ssend"])
def test_objects_are_sent_by_the_names_of_mpi4pys_arguments(name: str) -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        request = comm.irecv(source=0, tag=7)
        getattr(comm, name)(obj=[1, 2], dest=0, tag=7)
        assert request.wait() == [1, 2]


def test_objects_show_their_place_and_state() -> None:
    with mpicomm.Communicator(MPI.COMM_SELF, device="cpu") as comm:
        assert repr(comm) == "<mpicomm.Communicator rank 0 of 1 device='cpu' handle='memfd'>"
        event, win = comm.shared_event(), mpicomm.Win.Allocate(8, 8, comm=comm)
        x, y = np.ones(8), np.empty(8)
        requests = comm.Iallreduce(x, y), comm.Iallreduce(x, y, algorithm="one_shot")
        shown = ["SharedEvent device='cpu'", "mpicomm.Win place='mpi'"]
        shown += ["mpicomm.Request active", "mpicomm.DeferredRequest active"]
        assert [*map(repr, (event, win, *requests))] == [f"<{text}>" for text in shown]
        event.close()
        win.Free()
        MPI.Request.Waitall([*requests])
        shown = ["SharedEvent closed", "mpicomm.Win freed"]
        shown += ["mpicomm.Request inactive", "mpicomm.DeferredRequest inactive"]
        assert [*map(repr, (event, win, *requests))] == [f"<{text}>" for text in shown]


def test_edges_of_grids() -> None:
    assert edges_of_grid([3], [False], 3) == edges_of_grid([3], None, 4) == {(0, 1): 1, (1, 2): 1}
    assert edges_of_grid([3], [True], 3) == edges_of_grid([3], True, 3) == {(0, 1): 1, (1, 2): 1, (2, 0): 1}
    assert edges_of_grid([2, 2], [False, False], 4) == {(0, 1): 1, (2, 3): 1, (0, 2): 1, (1, 3): 1}
    assert edges_of_grid([2], [True], 2) == {(0, 1): 1, (1, 0): 1}
    # MPI refuses these.
    for dims, periods in (([5], [True]), ([0], [True]), ([2, 2], [True]), ([1 << 40, 1 << 40], [True, True])):
        assert edges_of_grid(dims, periods, 4) == {}


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
    device = ThreadDevice(0, 5.0)
    rendezvous, steps = Rendezvous(lambda _: cast(GpuBackend, device), 5.0, bytes(32), None), device.message_steps

    def outbox(operation: str) -> Any:
        rendezvous.begin(operation)
        return rendezvous.outbox

    second = Second(lambda: outbox("Recv"))

    def message_steps() -> Any:
        second.meanwhile()
        return steps()

    monkeypatch.setattr(device, "message_steps", message_steps)
    assert outbox("Send") is second.joined()
    rendezvous.reset()
    device.close()


def test_a_communicator_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(tracer=None, set_up=lambda what: None)
    engines = Engines(cast(Session, session))
    second = Second(lambda: engines.on_gpu("Allreduce"))

    def make(session: object, operation: str) -> Any:
        second.meanwhile()
        return SimpleNamespace()

    monkeypatch.setattr(engines, "_make_on_gpu", make)
    assert engines.on_gpu("Send") is second.joined()


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
    for matched in queue.queued:
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
    queue.queued += taken


def test_a_receive_beside_a_probe_loses_no_message(queue: UnexpectedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    of, second = MatchedMessage.of, Second(lambda: queue.take(0, 1))

    def of_slowly(*arguments: Any) -> MatchedMessage:
        second.meanwhile()
        return of(*arguments)

    monkeypatch.setattr(MatchedMessage, "of", of_slowly)
    assert queue.probe(0, 2, None, wait=False)
    assert second.joined().tag == 1
    queue.queued.append(second.joined())
