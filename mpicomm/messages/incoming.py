"""Incoming: a message on its way into a buffer, while the caller goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.messages.device import MessageDevice
from mpicomm.messages.landing import Landing
from mpicomm.messages.matched import Matched


class Incoming:
    """A receive that MPI has begun, and which goes on to ``landing`` after ``mark`` in its stream; one call at a time.

    MPI is not asked for it until ``before`` returns true, and ``matched``, if it is one, corrects what MPI says of it.
    """

    def __init__(
        self,
        landing: Landing,
        device: MessageDevice,
        request: MPI.Request,
        matched: Matched | None,
        mark: Any,
        before: Callable[[], bool],
    ) -> None:
        self.status = MPI.Status()
        self._landing = landing
        self._device = device
        self._request: MPI.Request | None = request
        self._matched = matched
        self._mark = mark
        self._before = before
        self._is_there: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Return whether the message is in the buffer, or was cancelled."""
        if self._is_there is None:
            if not self._has_come():
                return False
            if self.status.Is_cancelled():
                return True
            streams, landing = self._device.side_streams, self._landing
            # `bring` would wait for all that is on the stream, and nobody else is served meanwhile.
            if self._mark is not None and landing.waits and not streams.passed(self._mark):
                return False
            self._is_there = self._bring()
        return self._is_there()

    def cancel(self) -> None:
        """Let a message that has not come yet not come at all."""
        if self._request is not None:
            self._request.Cancel()

    def _has_come(self) -> bool:
        if self._request is not None and self._before() and self._request.Test(self.status):
            self._request = None  # as it is to MPI
            if not self.status.Is_cancelled():
                if self._matched is not None:
                    self._matched.correct(self.status)
                self._landing.arrived(self.status)
        return self._request is None

    def _bring(self) -> Callable[[], bool]:
        """Bring what has come on a stream of its own; return a function that says whether it is there."""
        if not self._landing.brings:
            return lambda: True
        streams = self._device.side_streams
        # Of its own: it may wait for its sender, and what the user enqueues meanwhile, or receives, does not.
        side = streams.take(self._mark)
        try:
            self._landing.bring(self.status, side)
            return self._device.completion(side)
        finally:
            streams.give_back(side)
