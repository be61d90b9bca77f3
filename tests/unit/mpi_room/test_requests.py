from __future__ import annotations

import threading
import time
from collections.abc import Callable

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


class EndOfTestError(Exception):
    """Ends the loop of a completer's thread, which the thread of a test plays."""


class Clock:
    """The clock of a completer's thread. Only its pauses take time."""

    def __init__(self, last: int) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self._last = last

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, pause_s: float) -> None:
        self.now_s += pause_s
        self.pauses.append(pause_s)
        if len(self.pauses) == self._last:
            raise EndOfTestError


def pauses(
    monkeypatch: pytest.MonkeyPatch, completer: Completer, works: Callable[[Clock], list[DeferredRequest]]
) -> list[float]:
    """Play the thread of a completer with some work; return the first 152 pauses."""
    settle(lambda: completers() == 0)  # a thread of another test would use this test's clock
    clock = Clock(152)
    monkeypatch.setattr(requests, "time", clock)
    completer._pending += works(clock)
    with pytest.raises(EndOfTestError):
        completer._run(nothing)
    return clock.pauses


def two_works(clock: Clock) -> list[DeferredRequest]:
    """Work that is never done, and work that is done after 150 pauses."""
    return [
        DeferredRequest.of(lambda: False, nothing),
        DeferredRequest.of(lambda: len(clock.pauses) == 150, nothing),
    ]


def test_pauses_are_short_while_there_was_something_to_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pauses(monkeypatch, Completer(), two_works)
    assert made[:99] == [50e-6] * 99
    assert made[105:150] == [1e-3] * 45
    assert made[150:] == [50e-6] * 2  # short again, because the thread has completed work


def test_pauses_are_long_if_work_goes_on_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pauses(monkeypatch, Completer(by_itself=True), two_works) == [1e-3] * 152


def test_work_that_goes_on_by_itself_is_not_looked_at_in_the_first_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Wait` has usually completed it by then, and a look would keep the interpreter's lock from the program."""
    completer = Completer(by_itself=True)
    first: list[int] = []
    second: list[int] = []
    """The pauses before each look at two works. The second comes after two looks at the first."""

    def works(clock: Clock) -> list[DeferredRequest]:
        def second_is_done() -> bool:
            second.append(len(clock.pauses))
            return True

        def first_is_done() -> bool:
            first.append(len(clock.pauses))
            if len(first) == 2:
                completer._pending.append(DeferredRequest.of(second_is_done, nothing))
            return len(first) == 4

        return [DeferredRequest.of(first_is_done, nothing), DeferredRequest.of(lambda: False, nothing)]

    pauses(monkeypatch, completer, works)
    assert first == [2, 3, 4, 5]
    assert second == [4]  # it came in the third look


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
