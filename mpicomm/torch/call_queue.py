"""CallQueue: the order of the calls of one group, and the thread and the works of its calls on tensors of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from mpicomm.torch.works import FOREVER, WAITS, PendingWork, Tensors, Work, too_late, translated
from mpicomm.waiting import start_thread

T = TypeVar("T")


class HostWork(PendingWork):
    """A call on host tensors, which the thread of its ``queue`` carries out."""

    limit = FOREVER
    """Each wait for the call ends after this time, and the call goes on."""

    def __init__(self, queue: CallQueue, call: Callable[[], None], outputs: Tensors, name: str) -> None:
        super().__init__(outputs)
        self.queue = queue
        self._call: Callable[[], None] | None = call
        self._name = name
        self._over = threading.Event()
        self._lock = threading.Lock()  # of `_over` and `_ended`, so that a future is settled once
        self._ended: torch.futures.Future[Any] | None = None

    def carry_out(self) -> None:
        """Carry the call out, release its waiters, and settle its future. The work keeps its error."""
        assert self._call is not None
        with self.queue.turn:
            try:
                self._call()
            except BaseException as error:
                self._error = translated(error, self._name)
        self._call = None  # it keeps the tensors
        with self._lock:
            self._over.set()
            ended, self._ended = self._ended, None
        if ended is not None:
            super()._settle(ended)

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, and the call goes on."""
        limit = timeout or self.limit
        self.queue.hurry(self._over)
        if not self._over.wait(limit.total_seconds() or None):
            raise too_late(self._name, limit)
        return super().wait()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        self.queue.hurry(self._over)
        with self._lock:
            if not self._over.is_set():
                self._ended = ended
                return
        super()._settle(ended)


class CallQueue:
    """Keeps the calls of a group in the order in which the program makes them, and carries out calls on host tensors.

    A thread carries out asynchronous calls, so that the program computes meanwhile, and so that ranks may begin calls
    of two groups in different orders. A blocking call runs in the caller's thread, after the calls before it. A call on
    tensors of a GPU does not wait for its kernels.

    A callback of a future may make calls. If the program adds it before it begins another call, as hooks of DDP do,
    the calls come before that call on all ranks: the thread carries out the calls of its callback at once, and a
    callback of a complete future runs in the program's thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of `_waiting`, `_thread`, `_is_closed`, and the order of `_items`
        self._waiting = 0  # the calls and callbacks that the thread has not ended
        self._items: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        self._is_closed = False
        # A call holds it, because the engine of a group carries out one call at a time.
        self.turn = threading.Lock()
        self.end_turn = self.turn.release

    def begin(self, call: Callable[[], None], outputs: Tensors, name: str) -> HostWork:
        """Begin a call. The work raises its errors, `translated`. Local."""
        work = HostWork(self, call, outputs, name)
        if not self.is_here():
            with self._lock:
                if not self._is_closed:
                    if self._thread is None:
                        self._thread = start_thread(self._work, self._name, lambda: self.close(0))
                        self._thread_id = self._thread.ident
                    self._waiting += 1
                    self._items.put(work.carry_out)
                    return work
        # A callback may wait for the work of its call, so the thread would never come to the call in the queue.
        work.carry_out()
        return work

    def call(self, name: str, call: Callable[..., T], *arguments: Any) -> T:
        """Carry out ``call(*arguments)`` in its turn in the calling thread. Raises its errors `translated`."""
        self.take_turn()
        try:
            return call(*arguments)
        except WAITS as error:
            raise translated(error, name) from error
        finally:
            self.end_turn()

    def take_turn(self) -> None:
        """Wait until all earlier calls are over. The turn of a call of the calling thread lasts until `end_turn`."""
        # The test follows the taking of the turn, because a call that another thread begins later waits for the turn.
        # While the thread of the queue calls callbacks, `_waiting` still counts their call.
        if self.turn.acquire(False):
            if not self._waiting:
                return
            self.turn.release()
        if not self.is_here():
            self.begin(lambda: None, (), "turn").wait()
        self.turn.acquire()  # the call of a callback comes before all calls in the queue

    def close(self, limit_s: float) -> bool:
        """End the thread after the calls that it has. Return whether it has ended within ``limit_s`` seconds. Local."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def hurry(self, over: threading.Event) -> None:
        """In a callback, carry out calls until ``over``, because the thread comes to none before it returns. Local."""
        while self.is_here() and not over.is_set():
            self._carry_out_next()

    def is_here(self) -> bool:
        """Return whether the thread of the queue calls this. Local."""
        return threading.get_ident() == self._thread_id

    def _work(self) -> None:
        while self._carry_out_next():
            pass
        self._thread_id = None  # the system may give the number to another thread

    def _carry_out_next(self) -> bool:
        """Carry out the next call. Return False at the end of the queue."""
        item = self._items.get()
        if item is None:
            return False
        item()
        # Callbacks make their calls before a call of the program may come. Otherwise two ranks could carry these calls
        # out in different orders.
        with self._lock:
            self._waiting -= 1
        return True


class JoinedWork(Work):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._outputs = [output for work in works for output in work._outputs]
        self._works = works

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. ``timeout`` bounds the wait for each call."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        over = all(work.is_completed() for work in self._works)
        self._error = next((work._error for work in self._works if work._error is not None), None)
        return over

    def _complete(self) -> torch.futures.Future[Any]:
        def outcome(joined: torch.futures.Future[Any]) -> Any:
            # On a GPU PyTorch calls this with a stream of its own, which waits here for the calls.
            torch.futures.wait_all(joined.value())
            return self.value

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(outcome)
