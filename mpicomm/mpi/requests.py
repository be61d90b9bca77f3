"""Requests for work that MPI does not know: work on a stream, or a message on its way into a device."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mpi4py import MPI

from mpicomm.mpi.errors import RefusedByMpiError
from mpicomm.mpi.request_lists import PAUSE_S, SPIN_S, Driven, replace_list_calls
from mpicomm.waiting import ENDING, start_thread

if TYPE_CHECKING:
    from typing_extensions import Self

_NEEDED_S = 5e-3  # for this time after it has completed work, the pauses of a progress thread stay short
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 16e-3  # its other pauses, each twice as long as the one before
_YIELDING_S = SPIN_S - 50e-6  # the end of a spin, in which it yields: most collectives of a GPU end before
_LINGER_S = 0.05  # a progress thread lives so long without work, because starting a thread takes longer
# Looked up once, because `super()` and attributes add their time to each request.
_byte = MPI.BYTE
_wait = MPI.Request.Wait
_test = MPI.Request.Test
_start_request = MPI.Grequest.Start
_new_request = MPI.Grequest.__new__


class DeferredRequest(Driven, MPI.Grequest):
    """An MPI request (a generalized request) for work that MPI does not know.

    The work is done when ``done`` has returned true and ``finish`` has run after it. After that neither is called
    again. All waits and tests raise the error of the work, also ``MPI.Request.Waitall`` and the others in
    request_lists.py.

    A message has a ``status``, which then holds the result for the request's status. `Cancel` calls ``cancel``, never
    while ``done`` runs. If the message is cancelled, ``done`` returns true.
    """

    # A subclass of mpi4py's class would keep these in a dictionary, which takes longer. The dictionary is for recorded
    # requests.
    __slots__ = (
        "__dict__", "_cancel", "_done", "_finish", "_lock", "_status", "driven", "error", "kept", "over", "silent",
    )  # fmt: skip
    _cancel: Callable[[], None] | None
    _done: Callable[[], bool]
    _finish: Callable[[], None]
    _status: MPI.Status | None
    _lock: threading.Lock
    driven: bool
    """Whether a thread drives the work, so that the progress thread may skip it."""
    error: BaseException | None
    kept: Any
    """The buffers, which live until the work is done.

    A caller may drop its own references, as in ``Ibcast(x + 1)``.
    """
    over: bool
    silent: bool
    """Whether a call of this package fills the status and raises the error, so that `_query` need not."""

    @classmethod
    def of(
        cls,
        done: Callable[[], bool],
        finish: Callable[[], None],
        status: MPI.Status | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> Self:
        """Return a request for work. Only a message, which has a ``status``, has a ``cancel``."""
        replace_list_calls()
        self: Self
        if status is None:
            self = _new_request(cls, _start_request(None, None, None))
        else:
            # mpi4py never reports a request without a cancel callback as cancelled. This callback does nothing, as
            # MPI holds its lock meanwhile, and the holder of `_lock` may wait for that. `Cancel` calls ``cancel``.
            self = _new_request(cls, _start_request(lambda into: self._query(into), None, lambda completed: None))
        self._done, self._finish, self._status, self._cancel = done, finish, status, cancel
        self._lock = threading.Lock()  # the waiting thread and the progress thread both advance the work
        self.error = self.kept = None
        self.over = self.driven = self.silent = False
        return self

    @property
    def active(self) -> Self | None:
        return self if self else None

    def advance(self, until_s: float = 0.0) -> bool:
        """Return whether the work is done, and complete the request if it is.

        It polls at least once, and until `time.perf_counter` shows ``until_s``.
        """
        with self._lock:
            alone_until_s = until_s - _YIELDING_S
            while not self.over:
                try:
                    over = self._done()
                    if over:
                        self._finish()
                except BaseException as error:
                    self.error, over = error, True
                if over:
                    self.kept = None
                    self.Complete()
                    self.over = True  # after MPI knows, because `Wait` reads it without the lock
                else:
                    now_s = time.perf_counter()
                    if now_s >= until_s:
                        return False
                    if now_s >= alone_until_s:  # not before, because a yield takes as long as several polls
                        os.sched_yield()  # to the rank that this one waits for, if ranks share cores
        return True

    def drive(self) -> None:
        """Wait for the work in this thread. A wait in MPI would keep the progress thread out for milliseconds.

        Most work takes less than `SPIN_S`. The later pauses are shorter than the pauses of `wait_until`,
        which could delay a collective of a millisecond.
        """
        self.driven = True
        try:
            until_s = time.perf_counter() + SPIN_S
            while not self.advance(until_s):
                time.sleep(PAUSE_S)
        finally:
            self.driven = False  # after a Ctrl-C the program may wait in MPI

    def fill(self, status: MPI.Status) -> None:
        """Write the result of the message into a status that MPI has filled for this request."""
        known = self._status
        if known is not None:
            status.Set_elements(_byte, known.Get_count(_byte))
            status.Set_cancelled(known.Is_cancelled())
            status.Set_source(known.source)
            status.Set_tag(known.tag)

    def _query(self, status: MPI.Status) -> None:
        """Fill the status of a wait inside MPI, which does not know this class: MPI's ``query_fn``."""
        if not self.silent:
            self.fill(status)
            if isinstance(self.error, MPI.Exception):
                raise self.error  # mpi4py returns its code to MPI, which raises it in the waiting thread

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the work is done. Raises the error of the work."""
        if not self.over:
            self.drive()
        self._take(_wait, status)
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the work is done. Raises the error of the work."""
        return self.advance() and self._take(_test, status)

    def _take(self, end: Callable[..., bool], status: MPI.Status | None) -> bool:
        """End the request in MPI, whose work is done. Raises the error of the work."""
        self.silent = True
        if status is None:
            end(self)
        else:
            is_active = bool(self)  # a wait for a null request leaves an empty status
            end(self, status)
            if is_active:
                self.fill(status)
        if self.error is not None:
            raise self.error
        return True

    def Cancel(self) -> None:
        """Cancel a receive if its message has not come yet, as in mpi4py. Other work is left unchanged."""
        super().Cancel()
        with self._lock:
            if self._cancel is not None and not self.over:
                self._cancel()


Work = TypeVar("Work")


class ProgressThread:
    """A thread that completes the work of one communicator. It lives as long as there is work.

    Work has ``over``, ``driven`` and ``advance()``: a `DeferredRequest`, or a message of a torch group.

    The thread makes progress without a call of the program. It also completes requests for waits inside MPI, because
    MPI does not notice that a device is done. It needs ``MPI.THREAD_MULTIPLE``, mpi4py's default. Without that, only
    the program's waits and tests advance the work.

    The thread polls, with pauses. No call wakes it: a wake-up would make the thread that starts a collective wait for
    the GIL, longer than the start takes. Each poll takes the GIL from other threads, too: a thousand polls a second
    slow a program that launches many kernels down by a tenth. So new work is polled only after a whole pause, because
    `Wait` has often completed it by then. The pauses get longer until the thread completes work itself, so work waits
    at most twice as long as it takes, or for the longest pause.

    ``self_driven`` work, such as work of a stream, goes on without polls. Then no pause is short.
    """

    def __init__(self, *, self_driven: bool = False) -> None:
        self._shortest_s = _FIRST_PAUSE_S if self_driven else PAUSE_S
        self._threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._pending: deque[Any] = deque()
        self._prepare: Callable[[], None] | None = None
        self._running = False
        self._beginning_or_ending = threading.Lock()

    def add(self, work: Work, prepare_thread: Callable[[], None] | None) -> Work:
        """Complete ``work`` as soon as it is done, and return it. The thread calls ``prepare_thread`` before.

        On a thread without a device any call of the CUDA runtime makes a context on the first GPU, which costs each
        rank with another GPU half a GiB of memory. Work without a device passes None, and the thread may have begun
        with such work.
        """
        if not self._threaded:
            return work
        self._prepare = prepare_thread or self._prepare  # before the thread sees the work
        self._pending.append(work)
        # After the append above. Only this test does without the lock: see `_may_end`.
        if not self._running:
            with self._beginning_or_ending:
                if not self._running:
                    self._running = True
                    start_thread(self._run, "mpicomm progress")
        return work

    def _run(self) -> None:
        is_prepared = False
        busy = needed = time.perf_counter()
        pause_s, polled = _FIRST_PAUSE_S, 0  # as many works, first in the queue, as the last poll has left
        while not ENDING.is_set():
            time.sleep(pause_s)
            now = time.perf_counter()
            if now - needed > _NEEDED_S:
                pause_s = min(max(2 * pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
            for _ in range(polled):
                work = self._pending.popleft()
                if work.over:  # `Wait` or `Test` has completed it
                    continue
                busy = now
                if self._prepare is not None and not is_prepared:
                    self._prepare()
                    is_prepared = True
                if not work.driven and work.advance():
                    needed, pause_s = now, self._shortest_s
                else:
                    self._pending.append(work)
            polled = len(self._pending)
            if now - busy > _LINGER_S and self._may_end():
                return

    def _may_end(self) -> bool:
        """Return whether the thread may end. If it may, it counts as ended at once."""
        with self._beginning_or_ending:
            # This thread clears the flag, then looks for work. `add` adds work, then tests the flag. In each order of
            # these four steps one side sees the other side's first step. If this thread misses some work, `add` has
            # added it later, has yet to test the flag, and starts a new thread. The lock keeps `add` from starting a
            # thread while this thread has seen the work and has yet to set the flag again.
            self._running = False
            self._running = bool(self._pending)
            return not self._running


class PersistentRequest(Driven, MPI.Prequest):
    """A persistent collective on device arrays, or a persistent receive on a communicator of GPUs.

    Each start makes a request. The handle of the persistent request itself is always ``MPI.REQUEST_NULL``.
    """

    _begin: Callable[[], DeferredRequest] | None
    _latest: DeferredRequest | None
    _release: Callable[[], object] | None

    @classmethod
    def of(cls, begin: Callable[[], DeferredRequest], release: Callable[[], object] | None = None) -> Self:
        """Return a request that calls ``begin`` at each start, and ``release`` when it is freed."""
        replace_list_calls()
        self = cls()
        self._begin = begin
        self._release = release
        self._latest = None
        return self

    # Until it is freed, the request is not null for the program, as in MPI.
    def __bool__(self) -> bool:
        return self._begin is not None or self.active is not None

    def __eq__(self, other: object) -> bool:
        return self is other if self else bool(super().__eq__(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as in mpi4py's requests

    @property
    def active(self) -> DeferredRequest | None:
        """The started call that no wait has taken yet."""
        return self._latest if self._latest else None

    def Start(self) -> None:
        """Start the call once more, as the call without ``_init`` does."""
        if self._begin is None:
            raise RefusedByMpiError("Start: this persistent request was freed; create another", MPI.ERR_REQUEST)
        if self.active is not None:
            raise RefusedByMpiError("Start: this persistent request is active; call Wait first", MPI.ERR_REQUEST)
        self._latest = self._begin()

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the started call is done. Return at once if none is started. Raises the error of the call."""
        return (self.active or MPI.REQUEST_NULL).Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the started call is done, or true if none is started. Raises the error of the call."""
        return (self.active or MPI.REQUEST_NULL).Test(status)

    def Cancel(self) -> None:
        """Cancel a started receive if its message has not come yet, as in mpi4py."""
        (self.active or MPI.REQUEST_NULL).Cancel()

    def Free(self) -> None:
        """Free the request, after a wait for the started call. A second call does nothing."""
        self._begin = None
        release, self._release = self._release, None
        try:
            self.Wait()
        finally:
            if release is not None:
                release()
