"""Requests for work that MPI does not know: of a device's stream, or a message on its way into a device."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mpi4py import MPI

from mpicomm.mpi.faults import RefusedByMpiError
from mpicomm.mpi.request_lists import PAUSE_S, SPIN_S, Driven, replace_list_calls

if TYPE_CHECKING:
    from typing_extensions import Self

_PAUSE_S = PAUSE_S
_NEEDED_S = 5e-3  # for so long after it has completed work, a completer looks with the short pauses
_LONG_PAUSE_S = 1e-3  # its pauses later
_LINGER_S = 0.05  # so long a completer without work lives: to start a thread takes longer than most collectives
_Handle: Any = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[MPI._sizeof(MPI.Request)]
_NULL = _Handle(MPI.REQUEST_NULL.handle).value
# Looked up once, because a program waits for `super()` behind the device.
_wait = MPI.Request.Wait
_test = MPI.Request.Test


class DeferredWork:
    """Work that MPI does not know, and the generalized request that is completed with it.

    The work is done when ``done`` has returned true and ``finish`` has run after it. Neither is called again then.

    A message has a ``status``, which by then holds the result for the request's own status. `DeferredWork.cancel` calls
    ``cancel``, never while ``done`` runs; ``done`` then returns true if the message is cancelled.
    """

    def __init__(
        self,
        done: Callable[[], bool],
        finish: Callable[[], None],
        status: MPI.Status | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        replace_list_calls()
        self._status = status
        self._cancel = cancel
        if status is None:  # a request without callbacks takes two thirds of the time
            self.request = MPI.Grequest.Start(None, None, None)
        else:
            # The callback for cancelling is there because mpi4py never reports a request without one as cancelled. It
            # does nothing, because MPI holds its lock while it calls back, and the thread that has the turn may wait
            # for that lock: DeferredRequest.Cancel calls `cancel`.
            self.request = MPI.Grequest.Start(self._say, None, lambda completed: None)
        self._error: BaseException | None = None
        self._raised_by_caller = False
        self._done = done
        self._finish = finish
        self._turn = threading.Lock()  # the waiting thread and the completer's thread both advance the work
        self.kept: Any = None
        """The buffers, which live until the work is done although a caller may drop them, as in ``Ibcast(x + 1)``."""
        self.over = False
        self.driven = False
        """Whether a thread drives the work, so that the completer leaves it alone. A completer that misses a change may
        complete the work, too."""

    def advance(self, until_s: float = 0.0) -> bool:
        """Return whether the work is done, and complete the request if it is. Look until the clock shows ``until_s``.

        The clock is `time.perf_counter`.
        """
        with self._turn:
            while not self.over:
                try:
                    over = self._done()
                    if over:
                        self._finish()
                except BaseException as error:
                    self._error, over = error, True
                if over:
                    self.over = True
                    self.kept = None
                    self.request.Complete()
                elif time.perf_counter() >= until_s:
                    return False
                else:
                    os.sched_yield()  # to the rank that this one waits for, where ranks share cores
        return True

    def test(self) -> bool:
        """As `advance`, for a caller that calls `require_success` when the work is done."""
        over = self.advance()
        self._raised_by_caller = over
        return over

    def drive(self) -> None:
        """Wait for the work in this thread. A wait in MPI would keep the completer's thread out for milliseconds.

        Most device collectives take less than `SPIN_S`. The pauses after that are shorter than those of `wait_until`,
        which could make a collective of a millisecond late.
        """
        self.driven = True
        try:
            until_s = time.perf_counter() + SPIN_S
            while not self.advance(until_s):
                time.sleep(PAUSE_S)
            self._raised_by_caller = True
        finally:
            self.driven = False  # after a Ctrl-C the program may wait in MPI

    def complete(self) -> None:
        """Wait for the work now. The request raises its error later, as if a completer had completed it."""
        self.drive()
        self._raised_by_caller = False

    def cancel(self) -> None:
        """Cancel a message that has not come yet, where that is possible."""
        with self._turn:
            if self._cancel is not None and not self.over:
                self._cancel()

    def has_failed(self) -> bool:
        """Return whether `require_success` raises for the work, which is done."""
        return self._error is not None

    def require_success(self) -> None:
        """Raise the error of the work, which is done, if it has one."""
        if self._error is not None:
            raise self._error

    def _say(self, status: MPI.Status) -> None:
        known = self._status
        assert known is not None
        status.Set_elements(MPI.BYTE, known.Get_count(MPI.BYTE))
        status.Set_cancelled(known.Is_cancelled())
        status.Set_source(known.source)
        status.Set_tag(known.tag)
        if isinstance(self._error, MPI.Exception) and not self._raised_by_caller:
            raise self._error  # mpi4py hands it to MPI, which raises it in the thread that waits there


_MpiRequest = TypeVar("_MpiRequest", bound=MPI.Request)


def holding(request: _MpiRequest, held: object) -> _MpiRequest:
    """Return ``request``, which keeps ``held`` until its Wait or Test has completed it, or until it dies. Local.

    mpi4py keeps the buffers of some calls alone, and a caller may drop them, as in ``Iallreduce(x + 1, y)``.
    """
    held_by: Any = (_HoldingPrequest if isinstance(request, MPI.Prequest) else _HoldingRequest)(request)
    held_by._held = held
    return held_by  # type: ignore[no-any-return]


class _HoldingRequest(MPI.Request):
    """A request of MPI that keeps the memory which MPI uses."""

    _held: object

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        _wait(self, status)
        self._held = None
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        done = _test(self, status)
        if done:
            self._held = None
        return done


class _HoldingPrequest(MPI.Prequest):
    """A persistent request of MPI that keeps the memory which each start uses."""

    _held: object


class DeferredRequest(Driven, MPI.Grequest):
    """An MPI request (a generalized one) for `DeferredWork`.

    All waits and tests raise the error of the work, also ``MPI.Request.Waitall`` and its kin: see request_lists.py.
    """

    work: DeferredWork

    def __new__(cls, work: DeferredWork) -> Self:
        """Wrap the generalized request of ``work``."""
        self = super().__new__(cls, work.request)
        self.work = work
        return self

    def is_active(self) -> bool:
        """Return whether no wait has taken the request yet."""
        return bool(self)

    def advance(self) -> bool:
        """Return whether the work is done."""
        return self.work.advance()

    def has_failed(self) -> bool:
        """Return whether `Wait` will raise the error of the work, which is done."""
        return self.work.has_failed()

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the work is done. Raises the error of the work."""
        work = self.work
        work.drive()
        _wait(self, status)
        if work._error is not None:
            raise work._error
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the work is done. Raises the error of the work."""
        self.work.test()
        done = super().Test(status)
        if done:
            self.work.require_success()
        return done

    def Cancel(self) -> None:
        """Cancel a receive whose message has not come yet, as in mpi4py. It leaves other work as it is."""
        super().Cancel()
        self.work.cancel()


class Completer:
    """Completes the work of one communicator, in a thread that lives while there is some.

    The thread lets work go on that nobody asks for, such as a message on its way. It completes requests for waits
    inside MPI, too, which do not notice that a device is done. It needs ``MPI.THREAD_MULTIPLE``, mpi4py's default; with
    less, `add` completes the work itself.

    The thread looks for work that is done, with pauses. Nothing wakes it, because a wake-up makes the thread that
    starts a collective wait for the interpreter's lock, longer than the start itself takes. A look, too, keeps that
    lock from other threads. So the pauses are short only while the thread has been of use: in a program whose `Wait`
    drives all work they are long.
    """

    def __init__(self) -> None:
        self._threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._pending: deque[DeferredWork] = deque()
        self._running = False
        self._beginning_or_ending = threading.Lock()

    def add(self, work: DeferredWork, prepare_thread: Callable[[], None]) -> DeferredWork:
        """Complete ``work`` as soon as it is done, and return it. A new thread begins with ``prepare_thread``.

        On a thread without a device any call of the CUDA runtime makes a context on the first GPU: half a GiB of memory
        for each of the ranks whose GPU is another.
        """
        if not self._threaded:
            work.complete()
            return work
        self._pending.append(work)
        # This look comes after the line above, and nowhere else is there a look without the lock: see `_may_end`.
        if not self._running:
            with self._beginning_or_ending:
                if not self._running:
                    self._running = True
                    threading.Thread(
                        target=self._run, args=[prepare_thread], name="mpicomm completer", daemon=True
                    ).start()
        return work

    def _run(self, prepare_thread: Callable[[], None]) -> None:
        prepare_thread()
        now = busy = needed = time.perf_counter()
        while True:
            time.sleep(_PAUSE_S if now - needed < _NEEDED_S else _LONG_PAUSE_S)
            now = time.perf_counter()
            for _ in range(len(self._pending)):
                work = self._pending.popleft()
                if work.over:  # `Wait` or `Test` has completed it
                    continue
                busy = now
                if not work.driven and work.advance():
                    needed = now
                else:
                    self._pending.append(work)
            if now - busy > _LINGER_S and self._may_end():
                return

    def _may_end(self) -> bool:
        """Return whether the thread may end. If so, it counts as ended from here on."""
        with self._beginning_or_ending:
            # This thread clears the flag, then looks for work; `add` adds work, then looks at the flag. In whichever
            # order these four steps come, one side sees the other's first step: if this look misses some work, `add`
            # has added it later, has yet to look at the flag, and starts a new thread. The lock keeps `add` from
            # starting one while this thread, which has seen the work, has yet to set the flag again.
            self._running = False
            self._running = bool(self._pending)
            return not self._running


class PersistentRequest(Driven, MPI.Prequest):
    """A persistent collective on device arrays, or a persistent receive on a communicator of GPUs.

    While it is active it has the MPI handle of the request that it has started. At other times its handle is
    ``MPI.REQUEST_NULL``.
    """

    _begin: Callable[[], DeferredWork] | None
    _started: DeferredWork | None
    _handle: Any
    _release: Callable[[], object] | None

    @classmethod
    def of(cls, begin: Callable[[], DeferredWork], release: Callable[[], object] | None = None) -> Self:
        """Return a request that calls ``begin`` each time it is started, and ``release`` when it is freed."""
        replace_list_calls()
        self = cls()
        self._begin = begin
        self._release = release
        self._started = None
        self._handle = _Handle.from_address(MPI._addressof(self))
        return self

    # Between two starts it is no null request for the program, as in MPI, although its handle is.
    def __eq__(self, other: object) -> bool:
        return self is other if self._is_inactive() else bool(super().__eq__(other))

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # as mpi4py's requests

    def __bool__(self) -> bool:
        return self._is_inactive() or super().__bool__()

    def _is_inactive(self) -> bool:
        return self._begin is not None and self._handle.value == _NULL

    def is_active(self) -> bool:
        """Return whether a call is started that no wait has taken yet."""
        return bool(self._handle.value != _NULL)

    def advance(self) -> bool:
        """Return whether the started call is done."""
        return self._started is None or self._started.advance()

    def has_failed(self) -> bool:
        """Return whether `Wait` will raise the error of the started call, which is done."""
        return self._started is not None and self._started.has_failed()

    def Start(self) -> None:
        """Start the call once more, as the call without ``_init`` does."""
        if self._begin is None:
            raise RefusedByMpiError("Start: this persistent request was freed; create another", MPI.ERR_REQUEST)
        if self._handle.value != _NULL:
            raise RefusedByMpiError("Start: this persistent request is active; call Wait first", MPI.ERR_REQUEST)
        self._started = started = self._begin()
        # MPI's calls on lists of requests read the handle alone, and write MPI.REQUEST_NULL into it.
        self._handle.value = started.request.handle

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the started call is done; return at once where none is started. Raises the error of the call."""
        if self._started is not None:
            self._started.drive()
        super().Wait(status)
        self._raise()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the started call is done; true where none is started. Raises the error of the call."""
        if self._started is not None:
            self._started.test()
        done = super().Test(status)
        if done:
            self._raise()
        return done

    def Cancel(self) -> None:
        """Cancel a started receive whose message has not come yet, as in mpi4py."""
        super().Cancel()
        if self._started is not None:
            self._started.cancel()

    def Free(self) -> None:
        """Free the request, after a wait for the started call. A second call does nothing."""
        self._begin = None
        self.Wait()
        release, self._release = self._release, None
        if release is not None:
            release()

    def _raise(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.require_success()
