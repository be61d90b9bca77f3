"""Nonblocking sends and receives in flight. Their requests ask them whether they are done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpicomm.devices.cuda.beside import SideStream
from mpicomm.messages.matched import Correct
from mpicomm.messages.outgoing import SendBuffer
from mpicomm.messages.receive_buffer import ReceiveBuffer


class PendingSend:
    """A send of a device array that MPI has begun. The object keeps the memory that MPI and the device still read.

    ``copied`` returns whether the device has copied the array. It is not called again after it has returned true.
    """

    def __init__(self, buffer: SendBuffer, request: MPI.Request, copied: Callable[[], bool]) -> None:
        self._buffer = buffer
        # Most headers leave at once. A later call of MPI may take long, because a thread that waits in MPI keeps other
        # threads out.
        self._request = None if request.Test() else request
        self._copied = copied

    def done(self) -> bool:
        """Return whether the array may be used again."""
        if self._request is not None and self._request.Test():
            self._request = None
        return self._request is None and self._copied()


class PendingReceive:
    """A receive that MPI has begun. One thread at a time calls its methods.

    ``mark`` lies in the user's stream, and the copies into a device array follow it. `done` asks ``before`` first, and
    asks MPI only after ``before`` has returned true. ``correct`` corrects the status that MPI fills.
    """

    def __init__(
        self,
        buffer: ReceiveBuffer,
        request: MPI.Request,
        correct: Correct | None,
        mark: Any,
        before: Callable[[], bool],
    ) -> None:
        self.status = MPI.Status()
        self._buffer = buffer
        self._request: MPI.Request | None = request
        self._correct = correct
        self._mark = mark
        self._before = before
        self._is_over = False  # whether the message needs no copies
        self._delivered: Callable[[], bool] | None = None

    def done(self) -> bool:
        """Return whether the message is in the user's memory, or the receive was cancelled."""
        if self._delivered is None:
            if not self._received():
                return False
            if self._is_over:
                return True
            # A delivery that waits for its stream would also wait for the user's work, and this thread would complete
            # no other request.
            streams = self._buffer.rendezvous.device.side_streams
            if self._buffer.blocks and self._mark is not None and not streams.passed(self._mark):
                return False
            self._delivered = self._enqueue()
        return self._delivered()

    def cancel(self) -> None:
        """Cancel the receive unless MPI has received the message."""
        if self._request is not None:
            self._request.Cancel()

    def _received(self) -> bool:
        if self._request is not None and self._before() and self._request.Test(self.status):
            self._request = None  # MPI has freed it
            self._is_over = True
            if not self.status.Is_cancelled():
                if self._correct is not None:
                    self._correct(self.status)
                self._is_over = not self._buffer.arrived(self.status)
        return self._request is None

    def _enqueue(self) -> Callable[[], bool]:
        """Enqueue the copies on a side stream. Return a function that says whether they are done.

        The copies may wait for the sender. On the user's stream they would hold up its later work, and other receives.
        """
        device = self._buffer.rendezvous.device
        with SideStream(device.side_streams, self._mark) as side:
            self._buffer.deliver(side)
            return device.completion(side)
