"""Lane: the order of the calls of one group, and the thread of those on tensors of the host."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from queue import SimpleQueue

import torch

from mpicomm.torch.works import HostWork, Work


class Lane:
    """Keeps the calls of a group in the order in which the program makes them, and carries out those on the host.

    A thread carries out the asynchronous ones, so that the program computes meanwhile, and so that ranks may begin
    calls of two groups in different orders. A blocking call runs in the caller's thread, after the calls before it.
    A call on tensors of a GPU, which does not wait for its kernels, takes its turn by a ``with`` block.

    The calls of a future's callback come after those that the program had begun when it asked for the future, and
    before later ones. A callback that the program adds at once makes its calls at the same place if the future is
    complete. So the order is the same on all ranks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of `_waiting`, `begun`, `_queue` and `_thread`
        self._waiting = 0  # calls that the thread has not ended
        self.begun = 0
        """How many calls the thread has got."""
        self._queue: SimpleQueue[HostWork | None] | None = None
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None
        # Held during a call, because the engine of a group carries out one call at a time. A caller takes it while it
        # holds `_lock`, so no call of another thread comes between its look at `_waiting` and its own call.
        self._turn = threading.Lock()
        # Only the thread uses the attributes below.
        self._take: Callable[[], HostWork | None] = lambda: None  # takes the next call, also when `_queue` is closed
        self._carried_out = 0  # how many calls the thread has carried out
        self._unended: deque[HostWork] = deque()  # calls that it has carried out, and whose callbacks it is to call
        self._ending: HostWork | None = None  # the call whose callbacks it calls now

    def run(
        self,
        call: Callable[[], None],
        outputs: Sequence[torch.Tensor],
        name: str,
        *,
        begin: bool,
        limit: timedelta | None = None,
    ) -> Work:
        """Carry out a call, or begin it; its errors are raised here, or by the work. Local.

        Each wait for the call ends after ``limit``, and the call goes on.
        """
        if begin or limit is not None:
            work = self._begin(HostWork(self, call, outputs, name, limit))
            if not begin:
                work.wait()
            return work
        with self:
            call()
        return Work(outputs)

    def __enter__(self) -> None:
        """Wait until all calls before are over: the ``with`` block is the turn of a call of the calling thread."""
        if threading.get_ident() == self._thread_id:
            if self._ending is not None:
                self.hurry(self._ending.calls_before)
            self._turn.acquire()  # for a callback of a call, which comes before all that is in the queue now
            return
        with self._lock:
            is_first = self._waiting == 0 and self._turn.acquire(blocking=False)
        if not is_first:
            self._begin(HostWork(self, lambda: None, (), "turn")).wait()
            self._turn.acquire()

    def __exit__(self, *exception: object) -> None:
        self._turn.release()

    @contextmanager
    def last_turn(self, limit_s: float) -> Iterator[bool]:
        """Close the lane; the ``with`` block is the turn behind all its calls, also those of the callers' threads.

        It gets False, and no turn, where these calls have not ended within ``limit_s`` seconds. Local.
        """
        ends_s = time.monotonic() + limit_s
        ended = self.close(limit_s) and self._turn.acquire(timeout=max(0.0, ends_s - time.monotonic()))
        try:
            yield ended
        finally:
            if ended:
                self._turn.release()

    def close(self, limit_s: float) -> bool:
        """End the thread after the calls that it has; return whether it has ended within ``limit_s`` seconds. Local.

        In a callback the thread cannot wait for its end, and carries out the calls at once.
        """
        with self._lock:
            queue, self._queue = self._queue, None
            thread = self._thread
        if queue is not None:
            queue.put(None)
        if threading.get_ident() == self._thread_id:
            self.hurry(self.begun)
            return True
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    def hurry(self, number: int) -> None:
        """Carry out the calls up to ``number`` at once where the thread calls this from a callback. Local.

        Until the callback returns, the thread does not come to the calls in its queue.
        """
        if threading.get_ident() != self._thread_id:
            return
        while self._carried_out < number:
            work = self._take()
            assert work is not None
            self._carry_out(work)

    def _begin(self, work: HostWork) -> HostWork:
        if threading.get_ident() == self._thread_id:
            # A callback of a call may wait for the work, so that the thread would never come to it in the queue.
            with self:
                work.carry_out()
            work.end()
            return work
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                # A daemon, because a call of a rank that never comes would keep the interpreter from its end.
                self._thread = threading.Thread(target=self._work, args=[self._queue], name=self._name, daemon=True)
                self._thread.start()
                self._thread_id = self._thread.ident
            self._waiting += 1
            self.begun = work.number = self.begun + 1
            self._queue.put(work)
        return work

    def _work(self, queue: SimpleQueue[HostWork | None]) -> None:
        self._take = queue.get
        while True:
            if not self._unended:
                taken = queue.get()
                if taken is None:
                    self._thread_id = None  # another thread may get the number now
                    return
                self._carry_out(taken)
                del taken
            self._ending = work = self._unended.popleft()
            # Callbacks make their calls before a call of the program may come: else two ranks could carry these out in
            # different orders.
            work.end()
            self._ending = None
            with self._lock:
                self._waiting -= 1
            del work  # it keeps the outputs

    def _carry_out(self, work: HostWork) -> None:
        with self._turn:
            work.carry_out()
        self._carried_out += 1
        self._unended.append(work)
