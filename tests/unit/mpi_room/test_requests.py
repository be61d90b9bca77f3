"""mpi4py's calls on lists of requests, over requests of this package, of MPI, and null ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from operator import eq
from typing import Any

import pytest
from mpi4py import MPI

from mpicomm.mpi import requests
from mpicomm.mpi.requests import Completer, DeferredRequest, PersistentRequest
from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import HANG_S


def complete(request: MPI.Request) -> None:
    """Wait for a request of MPI as MPI does, which does not know the work."""
    until = time.monotonic() + HANG_S
    plain = MPI.Request.fromhandle(request.handle)
    while not MPI.Request.Testall([plain]):
        assert time.monotonic() < until, "no thread has completed the work"
        time.sleep(0)


def settle(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(1e-3)


def completers() -> int:
    return sum(thread.name == "mpicomm completer" for thread in threading.enumerate())


def nothing() -> None:
    """Stand in for a function that makes a device current."""


def done_after(looks: int) -> DeferredRequest:
    """Work that is done after so many looks."""
    left = iter(range(looks))
    return DeferredRequest.of(lambda: next(left, None) is None, lambda: None)


def test_work_is_completed_without_a_wait() -> None:
    completer = Completer()
    for looks in (0, 1, 5):
        complete(completer.add(done_after(looks), nothing))


def test_the_thread_has_a_device_before_it_looks_at_any_work() -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> bool:
        seen.append((what, threading.current_thread().name))
        return True

    work = DeferredRequest.of(lambda: note("looks"), nothing)
    complete(Completer().add(work, lambda: nothing() if note("has a device") else None))
    assert seen == [("has a device", "mpicomm completer"), ("looks", "mpicomm completer")]


def test_no_work_is_forgotten_by_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work comes while the thread, which finds nothing to do, ends."""
    monkeypatch.setattr(requests, "_PAUSE_S", 0)
    monkeypatch.setattr(requests, "_LINGER_S", 0)
    completer = Completer()
    for number in range(2000):
        complete(completer.add(done_after(number % 3), nothing))


def test_the_thread_that_ends_sees_work_added_before() -> None:
    """The interleaving that could lose work, step by step: it comes just before the thread ends."""
    completer = Completer()
    completer._running = True  # this thread plays the completer's
    work = completer.add(done_after(0), nothing)
    assert not completer._may_end()
    assert completer._running
    completer._pending.clear()
    assert completer._may_end()
    complete(completer.add(work, nothing))  # by a new thread


def test_there_is_one_thread_and_none_in_the_end() -> None:
    settle(lambda: completers() == 0)
    completer = Completer()
    several = [completer.add(done_after(3), nothing) for _ in range(50)]
    assert completers() == 1
    for work in several:
        complete(work)
    settle(lambda: completers() == 0)


def test_the_thread_does_not_drive_the_work_of_another_one() -> None:
    asked: list[str] = []

    def ask() -> bool:
        asked.append(threading.current_thread().name)
        return True

    completer, work = Completer(), DeferredRequest.of(ask, nothing)
    work.driven = True
    completer.add(work, nothing)
    for _ in range(3):  # each look takes all pending work
        complete(completer.add(done_after(1), nothing))
    assert asked == []
    work.driven = False  # as after a Ctrl-C
    complete(work)
    assert asked == ["mpicomm completer"]


def test_who_drives_work_says_so_for_as_long() -> None:
    said: list[bool] = []

    def ask() -> bool:
        said.append(work.driven)
        if len(said) == 3:
            raise KeyboardInterrupt
        return False

    work = DeferredRequest.of(ask, nothing)
    work.drive()
    assert said == [True, True, True]
    assert not work.driven
    assert isinstance(work.error, KeyboardInterrupt)


@pytest.mark.parametrize("where", ["done", "finish"])
def test_what_went_wrong_is_raised_by_wait_and_test(where: str) -> None:
    def fail() -> bool:
        raise ValueError("it went wrong")

    for way in ("Wait", "Test"):
        work = DeferredRequest.of(fail, lambda: None) if where == "done" else DeferredRequest.of(lambda: True, fail)  # type: ignore[arg-type]
        request = Completer().add(work, nothing)
        with pytest.raises(ValueError, match="it went wrong"):
            getattr(request, way)()
        assert request == MPI.REQUEST_NULL


def test_a_persistent_request_needs_no_thread() -> None:
    before = set(threading.enumerate())  # threads of earlier tests may end meanwhile
    request = PersistentRequest.of(lambda: done_after(3))
    for _ in range(3):
        request.Start()
        request.Wait()
        request.Start()
        while not request.Test():
            assert set(threading.enumerate()) <= before
    request.Free()


ONE_THREAD = """
import mpi4py
mpi4py.rc.thread_level = "single"
from mpi4py import MPI
import numpy as np
import mpicomm
assert MPI.Query_thread() == MPI.THREAD_SINGLE
with mpicomm.Communicator(device="cpu") as comm:
    x, y = np.ones(9, np.float16), np.zeros(9, np.float16)
    for wait in (lambda request: request.Wait(), lambda request: MPI.Request.Waitall([request])):
        if comm.rank == 1:
            MPI.COMM_WORLD.recv(source=0)
        request = comm.Iallreduce(x, y)
        if comm.rank == 0:
            MPI.COMM_WORLD.send(None, 1)
        wait(request)
        assert (y == comm.size).all()
"""


def test_a_start_waits_for_no_rank_where_mpi_has_one_thread() -> None:
    result = run_job(2, "-c", ONE_THREAD)
    assert result.returncode == 0, result.stdout + result.stderr


TAG = 5
NULL, UNDEFINED = MPI.REQUEST_NULL, MPI.UNDEFINED
Switch = Callable[[], object]
completer = Completer()


def own(number: int = 0, error: Exception | None = None) -> tuple[DeferredRequest, Switch]:
    """Work that is done when the test says so, with a status that counts ``number`` bytes."""
    done: list[bool] = []
    status = MPI.Status()
    status.Set_elements(MPI.BYTE, number)
    status.Set_source(number)
    status.Set_tag(TAG)

    def ask() -> bool:
        if done and error is not None:
            raise error
        return bool(done)

    return completer.add(DeferredRequest.of(ask, lambda: None, status), lambda: None), lambda: done.append(True)


class Mixture:
    """Requests of all kinds, and a function that completes each of them."""

    def __init__(self) -> None:
        self.comm = MPI.Intracomm(MPI.COMM_SELF).Dup()
        deferred, first = own(1)
        started, second = own(2)
        self.persistent = PersistentRequest.of(lambda: started)
        self.persistent.Start()
        self.idle = PersistentRequest.of(lambda: started)
        self.inactive = self.comm.Recv_init(bytearray(3), 0, 1)
        self.sent: list[MPI.Request] = []
        self.requests = [
            deferred, NULL, self.comm.irecv(None, 0, TAG), self.idle, self.persistent, self.inactive,
            self.comm.Irecv(bytearray(3), 0, 2),
        ]  # fmt: skip
        self.active = [0, 2, 4, 6]
        self.switches: dict[int, Switch] = {
            0: first,
            4: second,
            2: lambda: self.sent.append(self.comm.isend("hello", 0, TAG)),
            6: lambda: self.sent.append(self.comm.Isend(b"123", 0, 2)),
        }

    def switch(self, *places: int) -> None:
        for place in places:
            self.switches.pop(place)()

    def require_over(self) -> None:
        assert [self.requests[place] for place in (0, 2, 6)] == [NULL] * 3
        assert self.persistent.active is None

    def close(self) -> None:
        self.switch(*self.switches)
        MPI.Request.Waitall([request for request in self.requests if request != NULL])
        MPI.Request.Waitall(self.sent)
        self.inactive.Free()
        self.comm.Free()


@pytest.fixture
def mixture() -> Iterator[Mixture]:
    made = Mixture()
    yield made
    made.close()


def until(call: Callable[[], Any], stops: Callable[[Any], bool]) -> Any:
    end = time.monotonic() + HANG_S
    while not stops(found := call()):
        assert time.monotonic() < end
    return found


@pytest.mark.parametrize("lower", [False, True])
def test_all(mixture: Mixture, lower: bool) -> None:
    request, statuses = MPI.Request, [MPI.Status()]
    test, wait = (request.testall, request.waitall) if lower else (request.Testall, request.Waitall)
    look = request.get_status_all if lower else request.Get_status_all
    mixture.switch(0, 2, 6)
    for _ in range(100):
        assert test(mixture.requests) == ((False, None) if lower else False)
        assert look(mixture.requests) is False
    assert [mixture.requests[place] != NULL for place in mixture.active] == [True] * 4  # none is taken
    mixture.switch(4)
    until(lambda: look(mixture.requests), bool)
    assert mixture.requests[0] != NULL
    said = until(lambda: test(mixture.requests, statuses), lambda found: found is True or (lower and found[0]))
    contents = [None, None, "hello", None, None, None, None] if lower else None
    assert said == ((True, contents) if lower else True)
    assert len(statuses) == 7
    assert (statuses[0].source, statuses[0].Get_count(MPI.BYTE)) == (1, 1)
    assert (statuses[4].source, statuses[4].Get_count(MPI.BYTE)) == (2, 2)
    assert statuses[6].Get_count(MPI.BYTE) == 3
    assert statuses[1].tag == statuses[3].tag == MPI.ANY_TAG
    mixture.require_over()
    assert wait(mixture.requests) == ([None] * 7 if lower else True)


@pytest.mark.parametrize("lower", [False, True])
def test_waiting_for_all(mixture: Mixture, lower: bool) -> None:
    mixture.switch(6, 4, 2, 0)
    statuses: list[MPI.Status] = []
    if lower:
        contents = MPI.Request.waitall(mixture.requests, statuses)
        assert contents == [None, None, "hello", None, None, None, None]
    else:
        assert MPI.Request.Waitall(requests=mixture.requests, statuses=statuses) is True
    assert [statuses[place].source for place in (0, 4)] == [1, 2]
    mixture.require_over()
    work, done = own()
    done()
    assert MPI.Request.Waitall((NULL, work), (MPI.Status(),)) is True  # type: ignore[arg-type]


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_any(mixture: Mixture, lower: bool, waits: bool) -> None:
    request = MPI.Request
    test, wait = (request.testany, request.waitany) if lower else (request.Testany, request.Waitany)
    look = request.get_status_any if lower else request.Get_status_any
    for place in (6, 0, 2, 4):
        assert test(mixture.requests) == ((UNDEFINED, False, None) if lower else (UNDEFINED, False))
        mixture.switch(place)
        assert until(lambda: look(mixture.requests), lambda found: found[1]) == (place, True)
        status = MPI.Status()
        if waits:
            found = wait(mixture.requests, status=status)
        else:
            found = until(partial(test, mixture.requests, status), lambda found: found[1])
        content = ("hello" if place == 2 else None,) if lower else ()
        if not waits:
            assert found == (place, True, *content)
        else:
            assert found == ((place, *content) if lower else place)
        assert status.Get_count(MPI.BYTE) == {6: 3, 0: 1, 4: 2}.get(place, status.Get_count(MPI.BYTE))
    assert test(mixture.requests) == ((UNDEFINED, True, None) if lower else (UNDEFINED, True))
    assert look(mixture.requests) == (UNDEFINED, True)
    assert wait(mixture.requests) == ((UNDEFINED, None) if lower else UNDEFINED)
    mixture.require_over()


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_some(mixture: Mixture, lower: bool, waits: bool) -> None:
    request = MPI.Request
    call = getattr(request, ("wait" if waits else "test") + "some" if lower else ("Wait" if waits else "Test") + "some")
    test = request.testsome if lower else request.Testsome
    look = request.get_status_some if lower else request.Get_status_some
    assert test(mixture.requests) == (([], []) if lower else [])
    for places in ([0, 6], [2, 4]):
        mixture.switch(*places)
        assert until(lambda: look(mixture.requests), partial(eq, places)) == places
        statuses = [MPI.Status()]
        found = call(mixture.requests, statuses)
        contents = ["hello" if place == 2 else None for place in places]
        assert found == ((places, contents) if lower else places)
        assert len(statuses) == 2
        counts = {0: 1, 4: 2, 6: 3}
        for place, status in zip(places, statuses, strict=True):
            assert status.Get_count(MPI.BYTE) == counts.get(place, status.Get_count(MPI.BYTE))
    assert call(mixture.requests) == ((None, None) if lower else None)
    assert look(mixture.requests) is None
    mixture.require_over()


def test_errors_are_raised_and_lose_no_other_request() -> None:
    for call in ("Waitall", "Testall", "Waitsome", "Testsome", "Waitany", "Testany"):
        (failing, fails), (sound, succeeds) = own(error=ValueError("it went wrong")), own(3)
        requests: list[MPI.Request] = [failing, sound, NULL]
        fails()
        succeeds()
        assert MPI.Request.Get_status_some(requests) == [0, 1]
        if call.endswith("some"):
            assert getattr(MPI.Request, call)(requests) == [1]
        elif call.endswith("any"):
            assert getattr(MPI.Request, call)(requests) == (1 if call == "Waitany" else (1, True))
        with pytest.raises(ValueError, match="it went wrong"):
            getattr(MPI.Request, call)(requests)
        assert requests == [NULL] * 3


def test_a_list_that_waits_lets_mpi_go_on_with_the_others() -> None:
    """The work is done when a message of the same list has come, which MPI brings only when it is called."""
    comm = MPI.Intracomm(MPI.COMM_SELF).Dup()
    content = bytearray(1 << 20)
    receive = comm.Irecv(content, 0, 1)
    send = comm.Isend(b"7" * (1 << 20), 0, 1)
    work = DeferredRequest.of(lambda: content[-1] == ord("7"), lambda: None)
    requests = [work, receive, send]
    MPI.Request.Waitall(requests)
    assert requests == [NULL] * 3
    comm.Free()


def test_startall_starts_requests_of_all_kinds() -> None:
    comm = MPI.Intracomm(MPI.COMM_SELF).Dup()
    content, started = bytearray(3), []

    def begin() -> DeferredRequest:
        started.append(True)
        work, done = own()
        done()
        return work

    requests = [comm.Recv_init(content, 0, 1), PersistentRequest.of(begin), comm.Send_init(b"123", 0, 1)]
    for number in (1, 2):
        content[:] = b"000"
        MPI.Prequest.Startall(requests)
        MPI.Request.Waitall(requests)
        assert content == b"123" and len(started) == number
    for request in requests:
        request.Free()
    comm.Free()


@pytest.mark.parametrize("method", ["Cancel", "cancel"])
def test_cancelled_requests_in_lists(method: str) -> None:
    status = MPI.Status()
    cancelled: list[bool] = []

    def cancel() -> None:
        cancelled.append(True)
        status.Set_cancelled(True)

    request = completer.add(DeferredRequest.of(lambda: bool(cancelled), lambda: None, status, cancel), lambda: None)
    statuses: list[MPI.Status] = []
    getattr(request, method)()
    MPI.Request.Waitall([NULL, request], statuses)
    assert statuses[1].Is_cancelled() and request == NULL


def test_lower_case_waits_of_one_request() -> None:
    for wait in (True, False):
        (request, done), status = own(4), MPI.Status()
        assert not request.get_status()
        done()
        if wait:
            assert request.wait(status) is None  # type: ignore[func-returns-value]
        else:
            assert until(partial(request.test, status), lambda found: found[0]) == (True, None)
        assert status.Get_count(MPI.BYTE) == 4 and request == NULL


def test_generalized_requests_of_the_program() -> None:
    own()[1]()  # the calls are replaced from the first request on
    for call in ("Waitall", "waitall", "Waitany", "Waitsome"):
        request = MPI.Grequest.Start(None, None, None)
        threading.Timer(0.02, request.Complete).start()
        getattr(MPI.Request, call)([request, NULL])
        assert request == NULL


def test_empty_lists_and_bad_arguments() -> None:
    request, done = own()
    empties: list[list[MPI.Request]] = [[], [NULL], [NULL] * 3]
    for empty in empties:
        assert MPI.Request.Waitall(empty) is True
        assert MPI.Request.Waitany(empty) == UNDEFINED
        assert MPI.Request.Testsome(empty) is None
    with pytest.raises(TypeError):
        MPI.Request.Waitall([request], others=1)  # type: ignore[call-arg]
    done()
    request.Wait()
