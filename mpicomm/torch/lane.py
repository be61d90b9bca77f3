"""Lane: the order of the calls of one group on tensors of the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from mpicomm.torch.works import HostWork, Work


class Lane:
    """Carries out calls on tensors of the host, in the order in which the program makes them.

    A thread carries out the asynchronous ones, so that the program computes meanwhile, and so that ranks may begin
    calls of two groups in different orders. A blocking call runs in the caller's thread where no call is before it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()  # of the two below
        self._waiting = 0  # calls that the thread has not ended
        self._queue: SimpleQueue[HostWork | None] | None = None
        self._thread: threading.Thread | None = None
        # Held during a call, because the engine of a group carries out one call at a time. A caller takes it while it
        # holds `_lock`, so no call of another thread comes between its look at `_waiting` and its own call.
        self._turn = threading.Lock()

    def run(self, call: Callable[[], None], outputs: Sequence[torch.Tensor], name: str, *, begin: bool) -> Work:
        """Carry out a call, or begin it; its errors are raised here, or by the work. Local."""
        if begin:
            return self._begin(call, outputs, name)
        with self._lock:
            is_first = self._waiting == 0 and self._turn.acquire(blocking=False)
        if not is_first:
            work = self._begin(call, outputs, name)
            work.wait()
            return work
        try:
            call()
        finally:
            self._turn.release()
        return Work(outputs)

    def close(self, limit_s: float) -> bool:
        """End the thread after the calls that it has; return whether it has ended within ``limit_s`` seconds. Local."""
        with self._lock:
            queue, self._queue = self._queue, None
            thread = self._thread
        if queue is not None:
            queue.put(None)
        if thread is not None:
            thread.join(limit_s)
        return thread is None or not thread.is_alive()

    def _begin(self, call: Callable[[], None], outputs: Sequence[torch.Tensor], name: str) -> HostWork:
        work = HostWork(call, outputs, name)
        with self._lock:
            if self._queue is None:
                self._queue = SimpleQueue()
                # A daemon, because a call of a rank that never comes would keep the interpreter from its end.
                self._thread = threading.Thread(target=self._work, args=[self._queue], name=self._name, daemon=True)
                self._thread.start()
            self._waiting += 1
            self._queue.put(work)
        return work

    def _work(self, queue: SimpleQueue[HostWork | None]) -> None:
        while (work := queue.get()) is not None:
            with self._turn:
                work.carry_out()
            with self._lock:
                self._waiting -= 1
            del work  # it keeps the outputs
