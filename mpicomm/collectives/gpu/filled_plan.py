"""FilledPlan: a plan into which each call fills its addresses and counts.

MessagePlan: the messages of one route. CountedPlan: calls with counts on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from mpicomm.collectives.gpu.algorithms.base import Node
from mpicomm.collectives.gpu.algorithms.packets.counted import CountedPackets
from mpicomm.collectives.gpu.algorithms.packets.ways import any_length_ways
from mpicomm.collectives.gpu.algorithms.sendrecv.plan import SendrecvTemplate
from mpicomm.collectives.gpu.choose import AlgorithmChoice
from mpicomm.collectives.gpu.fillings import NO_END, LaunchOf, launches_of
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.device_counts import CountedBuffers

if TYPE_CHECKING:
    from mpicomm.collectives.gpu.step_loader import StepLoader
    from mpicomm.devices.cuda.stream_order import Enqueue

BY_KERNELS = AlgorithmChoice("stream", "kernels match messages")
_WITH_COUNTS = AlgorithmChoice("one_shot", "the counts are on the GPU")


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


class CountedPlan(FilledPlan):
    """The calls of a form with counts on the device. Their buffers are of the same kinds as ``buffers``."""

    collective = True
    choice = _WITH_COUNTS
    count = 0
    offset: int | None = None
    """See `FormPlan`."""

    def __init__(self, signature: Signature, buffers: CountedBuffers, node: Node, loader: StepLoader) -> None:
        self.words = str(signature)
        self._template = CountedPackets(node, buffers, signature.hash32, any_length_ways(node))
        self._launch_of = launches_of(self._template, loader)
        self._itemsize = buffers.itemsize
        self._most = NO_END if buffers.receive.counts.is_wide else (1 << 31) - 1
        send, receive = ([each.nbytes for each in side.indices()] for side in (buffers.send, buffers.receive))
        self._nbytes = send[0], send[-1], receive[0], receive[-1]
        """The bytes of counts and of displacements to send, and of those to receive."""

    @property
    def text(self) -> str:
        return self.words

    def takes(self, sent: Any, received: Any) -> bool:
        """See `FormPlan.takes`."""
        return type(sent[3]) is type(received[3]) is int

    def fill(self, sent: Any, received: Any) -> bool:
        send, room, _, counts, displs = sent
        receive, most, _, coming, places = received
        if most > self._most:
            return False
        of_counts, of_displs, of_coming, of_places = self._nbytes
        nbytes, end, last = room * self._itemsize, receive + most * self._itemsize, coming + of_coming
        read = [(send, nbytes), (counts, of_counts)]
        if type(displs) is int:
            read.append((displs, of_displs))
        if type(places) is int:
            read.append((places, of_places))
        for begin, length in read:
            if (begin < end and receive < begin + length) or (begin < last and coming < begin + length):
                return False  # the call would write into an array that it reads
        if receive < last and coming < end:
            return False
        self.launch = self.enqueue = self._launch_of(self._template.fill(sent, received))
        self.private_nbytes = nbytes
        return True
