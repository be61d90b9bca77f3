"""Works of messages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.torch.failures import translated
from mpicomm.torch.works import FOREVER, PendingWork, too_late, when_over
from mpicomm.waiting import wait_until


class MessageWork(PendingWork):
    """A message that is sent or received. MPI moves it only inside its calls, so a `Completer` looks at it as well."""

    over = driven = False

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
            if not self.over:
                status = MPI.Status()
                try:
                    self.over = self._request.Test(status)
                except Exception as error:
                    self.over, self._error = True, translated(error, self._name)
                if self.over and self._receives:
                    self._source = status.source
        return self.over

    advance = is_completed

    def settle(self) -> None:
        """Wait for the message. `wait` raises its error later."""
        wait_until(self.is_completed, self._timeout_s)

    def _settle(self, ended: torch.futures.Future[Any]) -> None:
        def tell(failure: BaseException | None) -> None:
            self._settle_with(ended, failure or self._error)

        when_over(self, self._name, self._timeout_s, self._prepare_thread, tell)
