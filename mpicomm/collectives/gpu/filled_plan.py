"""FilledPlan: a plan into which each call fills its addresses and counts. MessagePlan: the messages of one route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate
from mpicomm.collectives.gpu.choose import AlgorithmChoice
from mpicomm.collectives.gpu.fillings import LaunchOf

if TYPE_CHECKING:
    from mpicomm.devices.cuda.stream_order import Enqueue

BY_KERNELS = AlgorithmChoice("stream", "kernels match messages")


class FilledPlan(ABC):
    """Calls that differ in addresses and counts. `DeviceEngine.enqueue` takes it like a `Plan`.

    `fill` makes it the plan of one call. The caller enqueues the filled call before it fills in the next call. Threads
    of a program do not make such calls at the same time. MPI forbids it for collectives. The order of messages in the
    order of streams must be the same on both ranks.
    """

    is_new = is_old = False
    steps = (None,)
    """It is not empty, because every rank has a part in a call that is filled in."""
    private_nbytes: int | None = None
    """See `Plan.private_nbytes`."""
    launch: Enqueue | None = None
    enqueue: Enqueue | None = None
    """Both enqueue the filled-in call; the device's context must be current."""

    @abstractmethod
    def fill(self, sent: Any, received: Any) -> bool:
        """Fill in a call with these buffers, as `plain_array` reads them; return whether it is possible. Local.

        The `Memory` of an epilogue's arrays follows the buffers. If `fill` returns False, the engine plans the call,
        which raises the errors of a wrong call.
        """

    @property
    @abstractmethod
    def text(self) -> str:
        """The text of the filled-in call."""

    def __str__(self) -> str:
        return self.text


class MessagePlan(FilledPlan):
    """The messages of one route between ranks, from and into buffers of one kind.

    ``element_nbytes`` are the bytes of an element of both buffers; 0 for a buffer that no message uses.
    """

    collective = False
    choice = BY_KERNELS

    def __init__(
        self, text: str, template: SendrecvTemplate, launch_of: LaunchOf, element_nbytes: tuple[int, int]
    ) -> None:
        self._text = text
        self._template = template
        self._launch_of = launch_of
        self._send_nbytes, self._receive_nbytes = element_nbytes

    @property
    def text(self) -> str:
        return self._text

    def fill(self, sent: Any, received: Any) -> bool:
        send, receive = sent[0], received[0]
        send_nbytes, receive_nbytes = sent[1] * self._send_nbytes, received[1] * self._receive_nbytes
        if send < receive + receive_nbytes and receive < send + send_nbytes:
            return False  # the buffers overlap
        filled = self._template.fill(send, send_nbytes, receive, receive_nbytes)
        if filled is None:
            return False
        self.launch = self.enqueue = self._launch_of(filled)
        return True
