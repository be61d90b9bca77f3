"""Requests for work that MPI does not know: a device's stream, or a message that still has to be copied to a device."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError

if TYPE_CHECKING:
    from typing_extensions import Self

_PAUSE_S = 50e-6
_NEEDED_S = 5e-3  # so long after it has completed work, a completer looks with the short pauses
_LONG_PAUSE_S = 1e-3  # the pauses of one that nobody has needed for that long
_LINGER_S = 0.05  # so long a completer without work lives: to start a thread takes longer than most collectives
_SPIN_S = 200e-6  # so long a wait looks without a pause: most device collectives take less
_Handle: Any = {4: ctypes.c_uint32, 8: ctypes.c_uint64}[MPI._sizeof(MPI.Request)]
_NULL = _Handle(MPI.REQUEST_NULL.handle).value


class Work:
    """Work that MPI does not know, and the generalized request that is completed with it.

    It is done once ``done`` has returned true and ``finish`` has run after it; no function is called again then.

    Of a message, ``status`` is filled by then with what the request's own status is to say, and ``cancel`` is called by
    `Work.cancel`, never while ``done`` runs; ``done`` then returns true if that is of any use.
    """

    def __init__(
        self,
        done: Callable[[], bool],
        finish: Callable[[], None],
        status: MPI.Status | None = None,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self._status = status
        self._cancel = cancel
        if status is None:  # without callbacks it takes two thirds of the time
            self.request = MPI.Grequest.Start(None, None, None)
        else:
            # What cannot be cancelled mpi4py never calls cancelled. `cancel` does it, not MPI, which is locked while it
            # calls back, when who has the turn may be waiting for it.
            self.request = MPI.Grequest.Start(self._say, None, lambda completed: None)
        self._error: BaseException | None = None
        self._raised_by_caller = False
        self._done = done
        self._finish = finish
        self._turn = threading.Lock()  # who waits and the completer's thread both advance it
        self.kept: Any = None
        """What has to live until the work is done: the buffers, which may be nobody else's, as in ``Ibcast(x + 1)``."""
        self.over = False
        self.driven = False
        """Whether a thread waits for it, and needs no other to complete it; one that misses this may do so."""

    def advance(self) -> bool:
        """Return whether the work is done; complete the request if it is."""
        with self._turn:
            if self.over:
                return True
            try:
                if not self._done():
                    return False
                self._finish()
            except BaseException as error:
                self._error = error
            self.over = True
            self.kept = None
            self.request.Complete()
            return True

    def test(self) -> bool:
        """As `advance`; who calls this then calls `require_success`."""
        over = self.advance()
        self._raised_by_caller = over
        return over

    def drive(self) -> None:
        """Wait for the work in this thread: a thread that waits in MPI keeps the completer's out for milliseconds.

        The pauses stay shorter than those of `wait_until`, by which a collective of a millisecond could be late.
        """
        if self.test():
            return
        self.driven = True
        try:
            until = time.perf_counter() + _SPIN_S
            while not self.test():
                if time.perf_counter() < until:
                    os.sched_yield()  # a sleep, of no time even, takes 50 us
                else:
                    time.sleep(_PAUSE_S)
        finally:
            self.driven = False  # who was interrupted may ask MPI for it

    def complete(self) -> None:
        """Wait for the work here and now, for those who ask the request for it later."""
        self.drive()
        self._raised_by_caller = False

    def cancel(self) -> None:
        """Let a message that has not come yet not come at all, if it can be helped."""
        with self._turn:
            if self._cancel is not None and not self.over:
                self._cancel()

    def require_success(self) -> None:
        """Raise what the work, which is done, has raised."""
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
            raise self._error  # mpi4py tells MPI, and MPI whoever waits in it


class DeferredRequest(MPI.Grequest):
    """An MPI request (a generalized one) for `Work`; MPI's own wait and test calls take it too.

    `Wait` and `Test` raise what went wrong with the work. So do ``MPI.Request.Waitall`` and its kin where it is an
    error of MPI's, a message that is too long say; of others they know nothing: after them the communicator's
    ``check()``, or its next call, raises.
    """

    work: Work

    def __new__(cls, work: Work) -> Self:
        """Wrap the generalized request of ``work``."""
        self = super().__new__(cls, work.request)
        self.work = work
        return self

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the work is done. Raises what the work raised."""
        self.work.drive()
        super().Wait(status)
        self.work.require_success()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the work is done. Raises what the work raised."""
        self.work.test()
        done = super().Test(status)
        if done:
            self.work.require_success()
        return done

    def Cancel(self) -> None:
        """Cancel a receive whose message has not come yet: see mpi4py. Of all else nothing comes of it."""
        super().Cancel()
        self.work.cancel()


class Completer:
    """Completes the work of one communicator, in a thread that lives while there is some.

    The thread exists so that ``MPI.Request.Waitall`` over a mixture of requests works: inside MPI's wait nobody else
    could notice that a device is done. It needs ``MPI.THREAD_MULTIPLE``, mpi4py's default; with less, work is completed
    before it is returned.

    The thread looks for work that is done, with pauses. Nothing wakes it, because a wake-up makes the thread that
    starts a collective wait for the interpreter's lock, longer than the start itself takes. A look, too, keeps that
    lock from other threads. So the pauses are short only while the thread has been of use: in a program whose `Wait`
    drives all work they are long.
    """

    def __init__(self) -> None:
        self._threaded = MPI.Query_thread() == MPI.THREAD_MULTIPLE
        self._pending: deque[Work] = deque()
        self._running = False
        self._beginning_or_ending = threading.Lock()

    def add(self, work: Work, prepare_thread: Callable[[], None]) -> Work:
        """Complete ``work`` as soon as it is done, and return it. A new thread begins with ``prepare_thread``.

        On a thread that has no device yet, whatever CUDA is asked, and be it to destroy an event with the last work
        that knows it, makes a context on the first GPU: half a GiB for each of the ranks whose GPU is another.
        """
        if not self._threaded:
            work.complete()
            return work
        self._pending.append(work)
        # After the line above, and nowhere else without the lock: see `_may_end`.
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
                if work.over:  # `Wait` and `Test` need no thread
                    continue
                busy = now
                if not work.driven and work.advance():
                    needed = now
                else:
                    self._pending.append(work)
            if now - busy > _LINGER_S and self._may_end():
                return

    def _may_end(self) -> bool:
        """Return whether the thread may end; it is not running any more then."""
        with self._beginning_or_ending:
            # The thread says that it ends, then looks for work; `add` adds work, then looks whether the thread runs.
            # Whichever order these four come in, one of the two sees what the other has done: work that this look
            # misses was added after it, by somebody who has yet to look and finds no thread. The lock keeps that one
            # from starting another thread while this one, which has seen the work, is still to say that it goes on.
            self._running = False
            self._running = bool(self._pending)
            return not self._running


class PersistentRequest(MPI.Prequest):
    """A persistent collective on device arrays, or a persistent receive on a communicator of GPUs.

    While it is active it has the MPI handle of what it has started, so ``MPI.Request.Waitall`` and its kin take it; at
    other times it is ``MPI.REQUEST_NULL`` to MPI. So ``MPI.Prequest.Startall`` cannot start it: call `Start`.
    """

    _begin: Callable[[], Work] | None
    _started: Work | None
    _handle: Any

    @classmethod
    def of(cls, begin: Callable[[], Work]) -> Self:
        """Return a request that calls ``begin`` each time it is started."""
        self = cls()
        self._begin = begin
        self._started = None
        self._handle = _Handle.from_address(MPI._addressof(self))
        return self

    def Start(self) -> None:
        """Start the call once more: as the one without ``_init``."""
        if self._begin is None:
            raise InvalidUsageError("Start: this persistent request was freed; create another")
        if self._handle.value != _NULL:
            raise InvalidUsageError("Start: this persistent request is active; call Wait first")
        self._started = started = self._begin()
        # MPI's calls on lists of requests look at nothing but the handle, and leave MPI.REQUEST_NULL there.
        self._handle.value = started.request.handle

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the started collective is done; at once if none is. Raises what went wrong."""
        if self._started is not None:
            self._started.drive()
        super().Wait(status)
        self._raise()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the started collective is done, or none is. Raises what went wrong."""
        if self._started is not None:
            self._started.test()
        done = super().Test(status)
        if done:
            self._raise()
        return done

    def Cancel(self) -> None:
        """Cancel a receive that is started and whose message has not come yet: see mpi4py."""
        super().Cancel()
        if self._started is not None:
            self._started.cancel()

    def Free(self) -> None:
        """Give the request up, after a wait for what it has started. A second call does nothing."""
        self._begin = None
        self.Wait()

    def _raise(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.require_success()
