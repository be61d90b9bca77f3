"""CallQueue: the order of the calls of one group, and the thread and the works of its calls on tensors of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from mpicomm.torch.works import NO_TIMEOUT, WAIT_ERRORS, PendingWork, Tensors, as_group_error, timeout_error
from mpicomm.waiting import start_thread

T = TypeVar("T")


class HostWork(PendingWork):
    """A call on host tensors, which the thread of its ``queue`` runs."""

    limit = NO_TIMEOUT
    """Each wait for the call ends after this time, and the call goes on."""

    def __init__(self, queue: CallQueue, call: Callable[[], None], outputs: Tensors, name: str) -> None:
        super().__init__(outputs)
        self._queue = queue
        self._call: Callable[[], None] | None = call
        self._name = name
        self._over = threading.Event()
        self._when_over: torch.futures.Future[None] = torch.futures.Future()

    def run(self) -> None:
        """Run the call, release its waiters, and then call the callbacks of its future. The work keeps its error."""
        assert self._call is not None
        with self._queue.call_lock:
            try:
                self._call()
            except BaseException as error:
                self._error = as_group_error(error, self._name)
        self._call = None  # it keeps the tensors
        self._over.set()
        self._when_over.set_result(None)

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, and the call goes on."""
        limit = timeout or self.limit
        self._queue.drain_until(self._over)
        if not self._over.wait(limit.total_seconds() or None):
            raise timeout_error(self._name, limit)
        return super().wait()

    def is_completed(self) -> bool:
        return self._over.is_set()

    def _make_future(self) -> torch.futures.Future[Any]:
        self._queue.drain_until(self._over)
        if self._over.is_set():
            self._when_over.wait()  # else a program that has waited for the work might find no value in the future
        return self._when_over.then(self._outcome)


class CallQueue:
    """Keeps the calls of a group in the order in which the program makes them, and runs calls on host tensors.

    A thread runs asynchronous calls, so that the program computes meanwhile, and so that ranks may begin calls of two
    groups in different orders. A blocking call runs in the caller's thread, after the calls before it. A call on
    tensors of a GPU does not wait for its kernels.

    A callback of a future may make calls. If the program adds it before it begins another call, as hooks of DDP do,
    the calls come before that call on all ranks: the thread runs the calls of its callback at once, and a callback of a
    complete future runs in the program's thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of `_unfinished`, `_thread`, `_is_closed`, and the order of `_items`
        self._unfinished = 0  # the calls that the thread has not finished, with their callbacks
        self._items: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        # Held during each call, because the engine of a group carries out one call at a time.
        self.call_lock = threading.Lock()
        self.release = self.call_lock.release

    def submit(self, call: Callable[[], None], outputs: Tensors, name: str) -> HostWork:
        """Let the thread run a call. The work raises its errors, after `as_group_error`. Local."""
        work = HostWork(self, call, outputs, name)
        if not self._in_thread():
            with self._lock:
                if not self._is_closed:
                    if self._thread is None:
                        self._thread = start_thread(self._run, self._name, lambda: self.close(0))
                    self._unfinished += 1
                    self._items.put(work.run)
                    return work
        # A callback may wait for the work of its call, so the thread would never come to the call in the queue.
        work.run()
        return work

    def run(self, name: str, call: Callable[..., T], *args: Any) -> T:
        """Return ``call(*args)``, after all earlier calls, in the calling thread. Raises by `as_group_error`."""
        self.acquire()
        try:
            return call(*args)
        except WAIT_ERRORS as error:
            raise as_group_error(error, name) from error
        finally:
            self.release()

    def acquire(self) -> None:
        """Wait until all earlier calls are over. Calls of other threads then wait for `release`."""
        # The test follows the locking, because a call that another thread begins later waits for the lock. While the
        # thread of the queue calls callbacks, `_unfinished` still counts their call.
        if self.call_lock.acquire(False):
            if not self._unfinished:
                return
            self.call_lock.release()
        if not self._in_thread():
            self.submit(lambda: None, (), "acquire").wait()
        self.call_lock.acquire()  # the call of a callback comes before all calls in the queue

    def close(self, limit_s: float) -> bool:
        """End the thread after the calls that it has. Return whether it has ended within ``limit_s`` seconds. Local."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._items.put(None)
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def drain_until(self, over: threading.Event) -> None:
        """In a callback, run calls until ``over``, because the thread runs none before the callback returns. Local."""
        while self._in_thread() and not over.is_set():
            self._run_next()

    def _in_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next call. Return False at the end of the queue."""
        run = self._items.get()
        if run is None:
            return False
        run()
        # Callbacks make their calls before a call of the program may come. Otherwise two ranks could run these calls in
        # different orders.
        with self._lock:
            self._unfinished -= 1
        return True
