"""CallQueue: the order of the calls of one group, and the thread and the works of its calls on tensors of the host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from mpicomm.torch.works import FOREVER, WAITS, PendingWork, Tensors, Work, ended, too_late, translated
from mpicomm.waiting import start_thread

T = TypeVar("T")


class HostWork(PendingWork):
    """A call on host tensors, which a thread carries out in the ``order`` of its group."""

    number = 0
    """The number of the call among the calls of the thread; 0 for a call that a callback makes."""

    def __init__(
        self,
        order: CallQueue,
        call: Callable[[], None],
        outputs: Tensors,
        name: str,
        limit: timedelta | None = None,
    ) -> None:
        super().__init__(outputs)
        self._order = order
        self._call: Callable[[], None] | None = call
        self._name = name
        self._limit = limit or FOREVER
        self._over = threading.Event()
        self._lock = threading.Lock()  # so that a future is settled once
        self._ended: torch.futures.Future[Any] | None = None

    def carry_out(self) -> None:
        """Carry the call out, and release its waiters. The work keeps its error. The caller calls `end` afterwards."""
        assert self._call is not None
        try:
            self._call()
        except BaseException as error:
            self._error = translated(error, self._name)
        self._call = None  # it keeps the tensors
        self._over.set()

    def end(self) -> None:
        """Call the callbacks of the future, which may make further calls. A second call does nothing."""
        # Pairs with the lock in `_settle`: if `_settle` keeps a future because the work is not over, this finds it.
        with self._lock:
            ended, self._ended = self._ended, None
        if ended is not None:
            super()._settle(ended)
            self._order.futures.pop(id(self._future), None)

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, and the call goes on."""
        limit = timeout or self._limit
        self._order.hurry(self.number)
        if not self._over.wait(limit.total_seconds() or None):
            raise too_late(self._name, limit)
        return super().wait()

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        return self._over.is_set()

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        self._order.hurry(self.number)
        with self._lock:
            if not self._over.is_set():
                self._ended = ended
                self._order.futures[id(self._future)] = [self]
                return
        super()._settle(ended)


class QueuePosition:
    """The position of a callback of ``works`` among the calls of a queue."""

    number = 0
    """See `HostWork.number`."""

    def __init__(self, works: Sequence[HostWork]) -> None:
        self._works = works

    def end(self) -> None:
        """Call the callbacks of the works, which are carried out. A second call does nothing."""
        for work in self._works:
            work.end()


class CallQueue:
    """Keeps the calls of a group in the order in which the program makes them, and carries out calls on host tensors.

    A thread carries out asynchronous calls, so that the program computes meanwhile, and so that ranks may begin calls
    of two groups in different orders. A blocking call runs in the caller's thread, after the calls before it. A call on
    tensors of a GPU does not wait for its kernels. A ``with`` block is its turn.

    A future's callback may make calls. They come after the calls that the program had begun when it added the callback,
    and before later calls. If the future is complete, a callback makes its calls at the same position, so the order is
    the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of `_waiting`, `_begun`, `_queue` and `_thread`
        self._waiting = 0  # the calls and positions that the thread has not ended
        self._begun = 0  # the number of calls and positions that the thread has got
        self.futures: dict[int, Sequence[HostWork]] = {}
        """The works of each future that is not complete, by the future's `id`."""
        self._queue: SimpleQueue[HostWork | QueuePosition | None] | None = None
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        # A call holds it, because the engine of a group carries out one call at a time.
        self._turn = threading.Lock()
        self.end_turn = self._turn.release
        # Only the thread uses the attributes below.
        self._take: Callable[[], HostWork | QueuePosition | None] = lambda: (
            None
        )  # takes the next item, also after `_queue` is closed
        self._carried_out = 0  # the number of the last call or position that the thread has come to
        self._unended: deque[HostWork | QueuePosition] = (
            deque()
        )  # it has carried these out, and has yet to call their callbacks
        self._place = 0  # the position of the running callback

    def run(
        self, call: Callable[[], None], outputs: Tensors, name: str, *, begin: bool, limit: timedelta | None = None
    ) -> Work:
        """Carry out a call, or begin it. This method or the work raises its errors, `translated`. Local.

        Each wait for the call ends after ``limit``, and the call goes on.
        """
        if begin or limit is not None:
            work = self._begin(HostWork(self, call, outputs, name, limit))
            if not begin:
                work.wait()
            return work
        self.call(name, call)
        return ended(outputs)

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
        if self._turn.acquire(False):
            if not self._waiting:
                return
            self._turn.release()
        if threading.get_ident() == self._thread_id:
            self.hurry(self._place)
        else:
            self._begin(HostWork(self, lambda: None, (), "turn")).wait()
        self._turn.acquire()  # the call of a callback comes before all calls in the queue

    def __enter__(self) -> None:
        self.take_turn()

    def __exit__(self, *exception: object) -> None:
        self.end_turn()

    @contextmanager
    def last_turn(self, limit_s: float) -> Iterator[bool]:
        """Close the queue. The ``with`` block is the turn after all calls, also in callers' threads. Local.

        If these calls have not ended within ``limit_s`` seconds, the block gets False, and no turn.
        """
        ends_s = time.monotonic() + limit_s
        ended = self.close(limit_s) and self._turn.acquire(timeout=max(0.0, ends_s - time.monotonic()))
        try:
            yield ended
        finally:
            if ended:
                self._turn.release()

    def close(self, limit_s: float) -> bool:
        """End the thread after the calls that it has. Return whether it has ended within ``limit_s`` seconds. Local.

        In a callback the thread cannot wait for its end, so it carries out the calls at once.
        """
        with self._lock:
            queue, self._queue = self._queue, None
            thread = self._thread
        if queue is not None:
            queue.put(None)
        if threading.get_ident() == self._thread_id:
            self.hurry(self._begun)
            return True
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    def hurry(self, number: int) -> None:
        """Carry out the calls up to ``number`` at once if the thread of the queue calls this from a callback. Local.

        Until the callback returns, the thread does not come to the calls in its queue.
        """
        if threading.get_ident() != self._thread_id:
            return
        while self._carried_out < number:
            work = self._take()
            assert work is not None
            self._carry_out(work)
            if isinstance(work, QueuePosition):
                work.end()  # callbacks with an earlier position than `number`

    def place(self, future: torch.futures.Future[Any]) -> int | None:
        """Return the position of a callback that is added to ``future`` now, or None if no callback can wait. Local."""
        if threading.get_ident() == self._thread_id:
            return self._place  # the position of the callback that adds it
        with self._lock:
            if self._waiting and self._queue is not None and id(future) in self.futures:
                self._enqueue(QueuePosition(self.futures[id(future)]), self._queue)
            return self._begun if self._waiting else None

    def is_here(self) -> bool:
        """Return whether the thread of the queue calls this. Local."""
        return threading.get_ident() == self._thread_id

    def call_at(self, place: int, callback: Callable[[Any], T], future: torch.futures.Future[Any]) -> T:
        """Call ``callback`` with ``place`` as the position of its calls. The thread of the queue calls this. Local."""
        before, self._place = self._place, place
        try:
            return callback(future)
        finally:
            self._place = before

    def _begin(self, work: HostWork) -> HostWork:
        if threading.get_ident() == self._thread_id:
            # A callback may wait for the work of its call, so the thread would never come to the call in the queue.
            with self:
                work.carry_out()
            work.end()
            return work
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                self._thread = start_thread(partial(self._work, self._queue), self._name, lambda: self.close(0))
                self._thread_id = self._thread.ident
                QUEUES.add(self)
            self._enqueue(work, self._queue)
        return work

    def _enqueue(self, work: HostWork | QueuePosition, queue: SimpleQueue[HostWork | QueuePosition | None]) -> None:
        self._waiting += 1
        self._begun = work.number = self._begun + 1
        queue.put(work)

    def _work(self, queue: SimpleQueue[HostWork | QueuePosition | None]) -> None:
        self._take = queue.get
        while True:
            if not self._unended:
                taken = queue.get()
                if taken is None:
                    self._thread_id = None  # the system may give the number to another thread
                    return
                self._carry_out(taken)
                del taken
            work = self._unended.popleft()
            # Callbacks make their calls before a call of the program may come. Otherwise two ranks could carry these
            # calls out in different orders.
            work.end()
            with self._lock:
                self._waiting -= 1
            del work  # it keeps the outputs

    def _carry_out(self, work: HostWork | QueuePosition) -> None:
        if isinstance(work, HostWork):
            with self._turn:
                work.carry_out()
        self._carried_out += 1
        self._unended.append(work)


QUEUES: WeakSet[CallQueue] = WeakSet()
"""The queues that have had a thread."""


class JoinedWork(PendingWork):
    """Several calls as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__([output for work in works for output in work._outputs])
        self._works = works

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. ``timeout`` bounds the wait for each call."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        over = all(work.is_completed() for work in self._works)
        self._error = next((work._error for work in self._works if work._error is not None), None)
        return over

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        parts = [work for work in self._works if isinstance(work, HostWork)]
        for part in parts:
            part._order.futures[id(self._future)] = parts
        # The value of the joined future has a list of outputs for each call.
        joined = torch.futures.collect_all([work.get_future() for work in self._works])
        gpu = next((output.device for output in self._outputs if output.is_cuda), None)

        def settle(_: Any) -> None:
            # On the host all calls are over. On a GPU this new stream waits for them, and no stream of the program
            # waits.
            with torch.cuda.stream(torch.cuda.Stream(gpu) if gpu else None):
                self._settle_with(ended, next(filter(None, map(_failure_of, self._works)), None))
            for part in parts:
                part._order.futures.pop(id(self._future), None)

        joined.add_done_callback(settle)


def _failure_of(work: Work) -> BaseException | None:
    """Return the error of a work with a complete future, or None. On a GPU the current stream waits for the work."""
    if isinstance(work, PendingWork):  # because a second wait for a late message would take the whole limit again
        return work._failure
    try:
        work.wait()
    except Exception as error:
        return error
    return None
