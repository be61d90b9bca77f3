"""Works of messages, which MPI carries while a thread calls it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.torch.failures import AsExpected
from mpicomm.torch.works import FOREVER, PendingWork, too_late
from mpicomm.waiting import wait_until


class MessageWork(PendingWork):
    """Messages that are sent or received. `over`, `driven`, `advance` and `complete` are for a `Completer`."""

    over = False
    """Whether the message is sent or received, or has an error."""
    driven = False
    """Whether a thread waits for the message."""

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
        """See `Work.wait`; raises `CollectiveTimeoutError` after ``timeout``, or after the group's timeout."""
        limit_s = timeout.total_seconds() or self._timeout_s
        self.driven = True
        try:
            if not wait_until(self.is_completed, limit_s):
                raise too_late(self._name, timedelta(seconds=limit_s))
        finally:
            self.driven = False
        return super().wait()

    complete = wait

    def is_completed(self) -> bool:
        """See `Work.is_completed`."""
        with self._lock:
            if not self.over:
                status = MPI.Status()
                try:
                    with AsExpected(self._name):
                        self.over = self._request.Test(status)
                except Exception as error:
                    self.over, self._error = True, error
                if self.over and self._receives:
                    self._source = status.source
        return self.over

    advance = is_completed

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        def settle() -> None:
            self._prepare_thread()
            failure: BaseException | None = None
            try:
                self.wait()
            except Exception as error:  # also where the limit of the future alone is over, and the message may come
                failure = error
            self._settle_with(ended, failure)

        threading.Thread(target=settle, name=f"mpicomm {self._name}", daemon=True).start()
