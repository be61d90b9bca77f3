"""How a known call is carried out: on which stream, what it waits for, and when it is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import InvalidUsageError
from tests.helpers.rigs.plan_caches import Array, Known, Tensor, arguments, install_libraries


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    install_libraries(monkeypatch)


def test_a_known_call_is_on_the_current_stream_of_the_library_it_was_on() -> None:
    known, send, receive, ignored = Known(), Array(16), Tensor(64), Array(128)
    for given, expected in (
        (arguments(send, receive), send),
        (arguments(MPI.IN_PLACE, receive), receive),
        (arguments(None, receive), receive),
        (arguments(send, None), send),
        (arguments([send, 4], receive), send),
        (arguments(MPI.IN_PLACE, (receive, 4)), receive),
        # A Scatter on a rank that is not the root.
        (arguments(ignored, receive), receive),
        (arguments([None, [1, 2], [0, 1], "f"], receive), receive),
    ):
        known.add("Reduce", given, by_output=expected is receive)
        for stream, where in ((None, expected), (5, 5)):
            known.find("Reduce", given, stream=stream)
            assert known.streams.pop() is where


def test_the_request_of_a_known_call_says_when_the_call_is_done() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    plan = known.add("Allreduce", given)
    request = known.start("Allreduce", given)
    assert known.enqueued == [(plan, 7)]
    assert not request.Test()
    known.done = True
    assert request.Test()
    known.runs = known.done = False  # in a capture
    assert known.start("Allreduce", given).Test()


def test_a_blocking_call_waits_beside_a_stream_that_several_threads_use(monkeypatch: pytest.MonkeyPatch) -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    plan = known.add("Allreduce", given)
    call = known._calls.find(OPERATIONS["Allreduce"], "auto", given.send, given.receive, given.op, 0, None)
    assert call is not None
    said: list[Any] = []
    marks = SimpleNamespace(
        mark=lambda stream: ("behind", stream), take=lambda mark: ("beside", mark), give_back=said.append
    )
    backend: Any = known._calls._session.backend
    backend.side_streams, backend.check = marks, lambda: said.append("check")
    backend.synchronize = lambda stream: said.append(["waits for", stream, len(known.enqueued)])
    for of_device, of_stream in ((False, False), (True, False), (True, True)):
        backend.meets = lambda stream, array, several=of_device: several
        backend.waits_beside = lambda stream, array, several=of_stream: several
        known._calls.enqueue(call, 7, given.send, given.receive, blocking=True)
    side = "beside", ("behind", 7)
    assert known.enqueued == [(plan, 7), (plan, 7), (plan, side)]
    assert known.met == [False, True, True]
    assert said == [["waits for", side, 3], side, "check"]
    known._calls.enqueue(call, 7, given.send, given.receive)
    assert known.enqueued[3:] == [(plan, 7)]  # a nonblocking call must not wait


@pytest.mark.parametrize("completes", [False, True])
@pytest.mark.parametrize("by_address", [False, True])
def test_a_blocking_call_waits_where_calls_complete_on_return_and_on_an_address(
    by_address: bool, completes: bool
) -> None:
    """No library knows the stream of the caller's next work on memory that an address names."""
    known, given = Known(), arguments(Array(16), Array(64))
    waited: list[Any] = []
    backend: Any = known._calls._session.backend
    backend.completes, backend.complete = completes, waited.append
    backend.meets = lambda stream, array: False
    known._calls.engine.template = lambda call, mappings, asked: None  # type: ignore[method-assign]
    read: Any = SimpleNamespace(operands=[SimpleNamespace(by_address=by_address)], in_place=False)
    plan: Any = SimpleNamespace(text="Allreduce")
    call = (OPERATIONS["Allreduce"], "auto", given.send, given.receive, given.op, 0, None, None, None)
    known._calls.add(plan, call, by_output=False, read=read)
    found = known._calls.find(*call)
    assert found is not None
    backend.stream = lambda stream, array: stream or "current"
    for blocking in (True, False):
        for stream in (None, 7):
            known._calls.enqueue(found, stream, given.send, given.receive, blocking=blocking)
    assert waited == (["current", 7] if completes else ["current"] * by_address)


def test_a_known_call_is_refused_if_the_communicator_is_unusable() -> None:
    known, given = Known(), arguments(Array(16), Array(64))
    known.add("Allreduce", given)
    known.usable = InvalidUsageError("Allreduce: the communicator was freed; create another")
    with pytest.raises(InvalidUsageError, match="freed"):
        known.find("Allreduce", given)
    assert known.enqueued == []
