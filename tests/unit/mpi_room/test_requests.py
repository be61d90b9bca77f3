"""mpi4py's calls on lists of requests, over requests of this package, of MPI, and null ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI

from mpicomm.mpi import requests
from mpicomm.mpi.requests import DeferredRequest, PersistentRequest, ProgressThread
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


def progress_threads() -> int:
    return sum(thread.name == "mpicomm progress" for thread in threading.enumerate())


def nothing() -> None:
    """Stand in for a function that makes a device current."""


def done_after(looks: int) -> DeferredRequest:
    """Work that is done after so many looks."""
    left = iter(range(looks))
    return DeferredRequest.of(lambda: next(left, None) is None, lambda: None)


def test_work_is_completed_without_a_wait() -> None:
    progress = ProgressThread()
    for looks in (0, 1, 5):
        complete(progress.add(done_after(looks), nothing))


def test_the_thread_has_a_device_before_it_looks_at_any_work() -> None:
    seen: list[tuple[str, str]] = []

    def note(what: str) -> bool:
        seen.append((what, threading.current_thread().name))
        return True

    work = DeferredRequest.of(lambda: note("looks"), nothing)
    complete(ProgressThread().add(work, lambda: nothing() if note("has a device") else None))
    assert seen == [("has a device", "mpicomm progress"), ("looks", "mpicomm progress")]


def test_no_work_is_forgotten_by_a_thread_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work comes while the thread, which finds nothing to do, ends."""
    for name in ("PAUSE_S", "_FIRST_PAUSE_S"):
        monkeypatch.setattr(requests, name, 0)
    monkeypatch.setattr(requests, "_LINGER_S", 0)
    progress = ProgressThread()
    for number in range(2000):
        complete(progress.add(done_after(number % 3), nothing))


def test_the_thread_that_ends_sees_work_added_before() -> None:
    """The interleaving that could lose work, step by step: it comes just before the thread ends."""
    progress = ProgressThread()
    progress._running = True  # this thread plays the progress thread's
    work = progress.add(done_after(0), nothing)
    assert not progress._may_end()
    assert progress._running
    progress._pending.clear()
    assert progress._may_end()
    complete(progress.add(work, nothing))  # by a new thread


def test_there_is_one_thread_and_none_in_the_end() -> None:
    settle(lambda: progress_threads() == 0)
    progress = ProgressThread()
    several = [progress.add(done_after(3), nothing) for _ in range(50)]
    assert progress_threads() == 1
    for work in several:
        complete(work)
    settle(lambda: progress_threads() == 0)


def test_the_thread_does_not_drive_the_work_of_another_one() -> None:
    asked: list[str] = []

    def ask() -> bool:
        asked.append(threading.current_thread().name)
        return True

    progress, work = ProgressThread(), DeferredRequest.of(ask, nothing)
    work.driven = True
    progress.add(work, nothing)
    for _ in range(3):  # each look takes all pending work
        complete(progress.add(done_after(1), nothing))
    assert asked == []
    work.driven = False  # as after a Ctrl-C
    complete(work)
    assert asked == ["mpicomm progress"]


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
        request = ProgressThread().add(work, nothing)
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


def test_a_persistent_request_whose_call_has_failed_is_released() -> None:
    def fail() -> bool:
        raise ValueError("it went wrong")

    released: list[bool] = []
    request = PersistentRequest.of(lambda: DeferredRequest.of(fail, nothing), lambda: released.append(True))
    request.Start()
    with pytest.raises(ValueError, match="it went wrong"):
        request.Free()
    assert released == [True] and request == MPI.REQUEST_NULL


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


NULL = MPI.REQUEST_NULL
Switch = Callable[[], object]
progress = ProgressThread()


def own(number: int = 0, error: Exception | None = None) -> tuple[DeferredRequest, Switch]:
    """Work that is done when the test says so, with the status of a message of ``number`` bytes and this tag."""
    done: list[bool] = []
    status = MPI.Status()
    status.Set_elements(MPI.BYTE, number)
    status.Set_source(0)
    status.Set_tag(number)

    def ask() -> bool:
        if done and error is not None:
            raise error
        return bool(done)

    return progress.add(DeferredRequest.of(ask, lambda: None, status), nothing), lambda: done.append(True)


KINDS = ("null", "object", "array", "inactive", "deferred", "persistent")
LISTS = [
    spell(name + find)
    for spell in (str, str.lower)
    for name in ("Wait", "Test", "Get_status_")
    for find in ("all", "any", "some")
]
ONE = ("Wait", "wait", "Test", "test", "Get_status", "get_status")


class Requests:
    """A list of requests. The request at each place is for a message with so many bytes and this tag.

    ``of_mpi`` has requests of MPI also in the places of requests of this package. They answer alike.
    """

    def __init__(self, kinds: list[str], *, of_mpi: bool) -> None:
        self.comm = MPI.Intracomm(MPI.COMM_SELF).Dup()
        self.of_mpi, self.kinds = of_mpi, kinds
        self.sent: list[MPI.Request] = []
        self.switches: dict[int, Switch] = {}
        """How the request at a place becomes complete; without those that are complete, or not started."""
        self.list = [self._made(kind, place) for place, kind in enumerate(kinds)]

    def _made(self, kind: str, place: int) -> MPI.Request:
        if kind == "inactive":
            return self.comm.Recv_init(bytearray(1), 0, place)
        if kind == "null" or (kind == "persistent" and self.of_mpi):  # until `start`
            return NULL
        if kind == "persistent":
            return PersistentRequest.of(lambda: self._own(place))
        if kind == "deferred" and not self.of_mpi:
            return self._own(place)
        if kind == "object":
            self.switches[place] = lambda: self.sent.append(self.comm.isend("hello", 0, place))
            return self.comm.irecv(None, 0, place)
        self.switches[place] = lambda: self.sent.append(self.comm.Isend(bytes(place), 0, place))
        return self.comm.Irecv(bytearray(len(KINDS)), 0, place)

    def _own(self, place: int) -> DeferredRequest:
        work, self.switches[place] = own(place)
        return work

    def start(self) -> None:
        places = [place for place, kind in enumerate(self.kinds) if kind == "persistent"]
        if self.of_mpi:
            for place in places:
                self.list[place] = self._made("array", place)
        else:
            MPI.Prequest.Startall([cast(MPI.Prequest, self.list[place]) for place in places])

    def complete(self, place: int) -> None:
        if place in self.switches:
            self.switches.pop(place)()
            settle(self.list[place].Get_status)

    def ends(self, name: str, place: int | None) -> bool:
        """Return whether a wait of this name ends."""
        if place is not None:
            return self.list[place].Get_status()
        request = MPI.Request
        return request.Get_status_all(self.list) if name.endswith("all") else request.Get_status_any(self.list)[1]

    def answer(self, name: str, place: int | None) -> tuple[Any, list[tuple[int, int, int]], list[bool]]:
        """Return what a call on the list, or on the request at a place, answers: also statuses, and which are null."""
        statuses, call = [MPI.Status()], getattr(MPI.Request if place is None else self.list[place], name)
        if place is not None:
            found = call(statuses[0])
            over = found is not False and found != (False, None)
        elif name.endswith("any"):
            found = call(self.list, status=statuses[0])
            over = not isinstance(found, tuple) or found[1] is not False
        else:
            found = call(requests=self.list, statuses=statuses)
            over = bool(found) and found[0] not in (False, []) if isinstance(found, tuple) else bool(found)
        said = [(each.source, each.tag, each.Get_count(MPI.BYTE)) for each in statuses] if over else []
        actives = [each.active if isinstance(each, PersistentRequest) else each for each in self.list]
        return found, said, [each is None or each == NULL for each in actives]

    def close(self) -> None:
        for place in range(len(self.list)):
            self.complete(place)
        MPI.Request.Waitall(self.list)
        MPI.Request.Waitall(self.sent)
        for request in self.list:
            if isinstance(request, MPI.Prequest):
                request.Free()
        self.comm.Free()


@settings(max_examples=300, deadline=None)
@given(st.data(), st.lists(st.sampled_from(KINDS), max_size=4))
def test_calls_answer_as_for_requests_of_mpi(data: st.DataObject, kinds: list[str]) -> None:
    ours, of_mpi = Requests(kinds, of_mpi=False), Requests(kinds, of_mpi=True)
    places = st.sampled_from(range(len(kinds)))
    if data.draw(st.booleans()):
        for each in (ours, of_mpi):
            each.start()
    steps = st.sampled_from([*LISTS, *(["complete"] * 6 + ["start"] * 2 + [*ONE] if kinds else [])])
    for step in data.draw(st.lists(steps, min_size=5, max_size=20)):
        place = data.draw(places) if step in ONE else None
        if step == "complete":
            arrived = data.draw(places)
            for each in (ours, of_mpi):
                each.complete(arrived)
        elif step == "start":  # after a wait for all, because an active request cannot start
            if of_mpi.ends("all", None):
                assert ours.answer("waitall", None) == of_mpi.answer("waitall", None)
                for each in (ours, of_mpi):
                    each.start()
        elif step[0] not in "Ww" or of_mpi.ends(step, place):
            assert ours.answer(step, place) == of_mpi.answer(step, place), (step, place)
    for each in (ours, of_mpi):
        each.close()


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


@pytest.mark.parametrize("method", ["Cancel", "cancel"])
def test_cancelled_requests_in_lists(method: str) -> None:
    status = MPI.Status()
    cancelled: list[bool] = []

    def cancel() -> None:
        cancelled.append(True)
        status.Set_cancelled(True)

    request = progress.add(DeferredRequest.of(lambda: bool(cancelled), lambda: None, status, cancel), lambda: None)
    statuses: list[MPI.Status] = []
    getattr(request, method)()
    MPI.Request.Waitall([NULL, request], statuses)
    assert statuses[1].Is_cancelled() and request == NULL


def test_generalized_requests_of_the_program() -> None:
    own()[1]()  # the calls are replaced from the first request on
    for call in ("Waitall", "waitall", "Waitany", "Waitsome"):
        request = MPI.Grequest.Start(None, None, None)
        threading.Timer(0.02, request.Complete).start()
        getattr(MPI.Request, call)([request, NULL])
        assert request == NULL
