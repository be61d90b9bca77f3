"""Requests for work that MPI does not know: a device's stream, or a message that still has to be copied to a device."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from mpi4py import MPI

from mpicomm.errors import InvalidUsageError

if TYPE_CHECKING:
    from typing_extensions import Self

_PAUSE_S = 50e-6
_LINGER_S = 0.05
_SPIN_S = 200e-6  # so long a wait looks without a pause: most device collectives take less


class DeferredRequest(MPI.Grequest):
    """An MPI request (a generalized one), completed by a `Completer`; MPI's own wait and test calls take it too.

    `Wait` and `Test` raise what went wrong with the work. ``MPI.Request.Waitall`` and its kin cannot: after them the
    communicator's ``check()``, or its next call, raises.
    """

    _pending: _Pending

    def __new__(cls, pending: _Pending) -> Self:
        """Wrap the generalized request of ``pending``."""
        self = super().__new__(cls, pending.request)
        self._pending = pending
        return self

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the work is done. Raises what the work raised."""
        self.drive()
        super().Wait(status)
        self.require_success()
        return True

    def drive(self) -> None:
        """Wait for the work in this thread: a thread that waits in MPI keeps the completer's out for milliseconds."""
        until = time.perf_counter() + _SPIN_S
        while not self._pending.advance():
            time.sleep(0 if time.perf_counter() < until else _PAUSE_S)

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the work is done. Raises what the work raised."""
        self._pending.advance()
        done = super().Test(status)
        if done:
            self.require_success()
        return done

    def require_success(self) -> None:
        """Raise what the work, which is done, has raised."""
        if self._pending.error is not None:
            raise self._pending.error


class _Pending:
    """Work that is not done yet, and the request that is completed with it."""

    def __init__(self, request: MPI.Grequest, done: Callable[[], bool], finish: Callable[[], None]) -> None:
        self.request = request
        self.error: BaseException | None = None
        self._done = done
        self._finish = finish
        self._turn = threading.Lock()  # who waits and the completer's thread both advance it
        self._over = False

    def advance(self) -> bool:
        """Return whether the work is done; complete the request if it is."""
        with self._turn:
            if self._over:
                return True
            try:
                if not self._done():
                    return False
                self._finish()
            except BaseException as error:
                self.error = error
            self._over = True
            self.request.Complete()
            return True


class Completer:
    """Completes the deferred requests of one communicator, in a thread that lives while there are some.

    The thread exists so that ``MPI.Request.Waitall`` over a mixture of requests works: inside MPI's wait nobody else
    could notice that a device is done. It needs ``MPI.THREAD_MULTIPLE``, mpi4py's default; with less, requests are
    completed before they are returned.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pending: list[_Pending] = []
        self._running = False

    def start(
        self, done: Callable[[], bool], finish: Callable[[], None], status: MPI.Status | None = None
    ) -> DeferredRequest:
        """Return a request that completes once ``done`` returns true and ``finish`` has run after it.

        ``status`` is filled by then with what the request's own status is to say.
        """

        def query(shown: MPI.Status) -> None:
            shown.Set_elements(MPI.BYTE, 0 if status is None else status.Get_count(MPI.BYTE))
            shown.Set_cancelled(False)
            if status is not None:
                shown.Set_source(status.source)
                shown.Set_tag(status.tag)

        request = MPI.Grequest.Start(query, _free, _cancel)
        pending = _Pending(request, done, finish)
        wrapped = DeferredRequest(pending)
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            wrapped.drive()
            return wrapped
        with self._changed:
            self._pending.append(pending)
            if self._running:
                self._changed.notify()
            else:
                self._running = True
                threading.Thread(target=self._run, name="mpicomm completer", daemon=True).start()
        return wrapped

    def _run(self) -> None:
        while True:
            time.sleep(_PAUSE_S)  # whoever has started a request may be about to wait for it
            over = {id(pending) for pending in list(self._pending) if pending.advance()}
            with self._changed:
                self._pending = [pending for pending in self._pending if id(pending) not in over]
                # To start a thread takes longer than most collectives: one that comes after the other finds it there.
                if not self._pending and not self._changed.wait_for(lambda: self._pending, _LINGER_S):
                    self._running = False  # under the lock: `start` either finds it running or starts another
                    return


class PersistentRequest(MPI.Prequest):
    """A persistent collective on device arrays.

    While it is active it has the MPI handle of what it has started, so ``MPI.Request.Waitall`` and its kin take it; at
    other times it is ``MPI.REQUEST_NULL`` to MPI. So ``MPI.Prequest.Startall`` cannot start it: call `Start`.
    """

    _begin: Callable[[], DeferredRequest] | None
    _started: DeferredRequest | None

    @classmethod
    def of(cls, begin: Callable[[], DeferredRequest]) -> Self:
        """Return a request that calls ``begin`` each time it is started."""
        self = cls()
        self._begin = begin
        self._started = None
        return self

    def Start(self) -> None:
        """Start the collective, enqueued on its stream. Collective."""
        if self._begin is None:
            raise InvalidUsageError("Start: this persistent request was freed; create another")
        if self != MPI.REQUEST_NULL:
            raise InvalidUsageError("Start: this persistent request is active; call Wait first")
        self._started = self._begin()
        # MPI's calls on lists of requests look at nothing but the handle, and leave MPI.REQUEST_NULL there.
        ctypes.memmove(MPI._addressof(self), MPI._addressof(self._started), MPI._sizeof(MPI.Request))

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:
        """Block until the started collective is done; at once if none is. Raises what went wrong."""
        if self._started is not None:
            self._started.drive()
        super().Wait(status)
        self._raise()
        return True

    def Test(self, status: MPI.Status | None = None) -> bool:
        """Return whether the started collective is done, or none is. Raises what went wrong."""
        done = super().Test(status)
        if done:
            self._raise()
        return done

    def Free(self) -> None:
        """Give the request up, after a wait for what it has started. A second call does nothing."""
        self._begin = None
        self.Wait()

    def _raise(self) -> None:
        started, self._started = self._started, None
        if started is not None:
            started.require_success()


def _free() -> None:
    pass


def _cancel(completed: bool) -> None:
    pass
