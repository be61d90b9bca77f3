"""MessagePlan: one plan for all messages in stream order between the same ranks, of one kind of buffers."""

from __future__ import annotations

from typing import Any

from mpicomm.collectives.gpu.algorithms.sendrecv.template import SendrecvTemplate
from mpicomm.collectives.gpu.choose import AlgorithmChoice
from mpicomm.collectives.gpu.fillings import Launches

BY_KERNELS = AlgorithmChoice("stream", "kernels match messages")


class MessagePlan:
    """Messages of one route. `DeviceEngine.enqueue` takes it like a `Plan`. `fill` makes it the plan of one call.

    ``element_nbytes`` are the bytes of an element of both buffers; 0 for a buffer that no message uses. The caller
    enqueues the filled call before it fills in the next call. Threads of the program do not send such messages at the
    same time, because the order of the messages must be the same on both ranks.
    """

    collective = False
    is_old = False
    steps = (None,)
    private_nbytes: int | None = None
    choice = BY_KERNELS

    def __init__(
        self, text: str, template: SendrecvTemplate, launcher: Launches, element_nbytes: tuple[int, int]
    ) -> None:
        self.text = text
        self._template = template
        self._launcher = launcher
        self._send_nbytes, self._receive_nbytes = element_nbytes
        self._blocks = self._threads = 0

    def __str__(self) -> str:
        return self.text

    def fill(self, sent: Any, received: Any) -> bool:
        """Fill in a call with these buffers, as `plain_array` reads them; return whether it is possible. Local.

        If `fill` returns False, the engine plans the call, which raises the errors of a wrong call.
        """
        send, receive = sent[0], received[0]
        send_nbytes, receive_nbytes = sent[1] * self._send_nbytes, received[1] * self._receive_nbytes
        if send < receive + receive_nbytes and receive < send + send_nbytes:
            return False  # the buffers overlap
        self._blocks, self._threads = self._template.fill(send, send_nbytes, receive, receive_nbytes)
        return self._blocks > 0

    def launch(self, stream: int) -> None:
        """Enqueue the filled-in call; the device's context must be current."""
        self._launcher.launch(stream, self._blocks, self._threads)

    enqueue = launch
