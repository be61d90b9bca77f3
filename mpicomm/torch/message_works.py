"""Works of messages, which MPI carries while a thread calls MPI."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.torch.failures import translated
from mpicomm.torch.works import FOREVER, PendingWork, too_late
from mpicomm.waiting import wait_until

_PAUSE_S = 1e-3  # between two looks at messages: most come meanwhile, and the program itself waits for them
_IDLE_PAUSE_S = 1e-2  # between two looks for messages: to wake the thread takes the program longer than to post one
_LINGER_S = 1.0  # after this time without a message the thread sleeps until the next message wakes it
_starting = threading.Lock()


class MessageWork(PendingWork):
    """A message that is sent or received."""

    _over = False

    def __init__(
        self,
        request: MPI.Request,
        tensor: torch.Tensor,
        name: str,
        timeout_s: float,
        prepare_thread: Callable[[], None],
        *,
        receives: bool,
    ) -> None:
        super().__init__([tensor])
        self._prepare_thread = prepare_thread
        self._request = request
        self._name = name
        self._timeout_s = timeout_s
        self._receives = receives
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta = FOREVER) -> bool:
        """See `Work.wait`. Raises `CollectiveTimeoutError` after ``timeout``, or after the group's timeout."""
        limit_s = timeout.total_seconds() or self._timeout_s
        if not wait_until(self.is_completed, limit_s):
            raise too_late(self._name, timedelta(seconds=limit_s))
        return super().wait()

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        with self._lock:
            if not self._over:
                status = MPI.Status()
                try:
                    self._over = self._request.Test(status)
                except Exception as error:
                    self._over, self._error = True, translated(error, self._name)
                if self._over and self._receives:
                    self._source = status.source
        return self._over

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        def settle() -> None:
            self._prepare_thread()
            failure: BaseException | None = None
            try:
                self.wait()
            except Exception as error:  # also if only the limit of the future is over, and the message may still come
                failure = error
            self._settle_with(ended, failure)

        threading.Thread(target=settle, name=f"mpicomm {self._name}", daemon=True).start()


class MessageProgress:
    """Moves messages of the host, in a thread, while the program waits outside MPI, as in a store.

    MPI moves a message only inside its calls. Requests for memory of GPUs have a `Completer`, which does the same.
    """

    def __init__(self) -> None:
        self._posted: SimpleQueue[MessageWork] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: MessageWork) -> None:
        """Move the message of ``work``, and keep the tensor as long as MPI uses it. Local."""
        self._posted.put(work)
        if self._thread is None:
            with _starting:
                if self._thread is None:
                    # The thread is a daemon, because a message that never comes would keep the interpreter from its
                    # end.
                    self._thread = threading.Thread(target=self._run, name="mpicomm messages", daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        pending: list[MessageWork] = []
        used = time.monotonic()
        while True:
            if not pending and time.monotonic() > used + _LINGER_S:
                pending.append(self._posted.get())
            while not self._posted.empty():
                pending.append(self._posted.get())
            if pending:
                used = time.monotonic()
            time.sleep(_PAUSE_S if pending else _IDLE_PAUSE_S)
            pending = [work for work in pending if not work.is_completed()]


MOVER = MessageProgress()
