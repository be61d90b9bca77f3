"""Messages in stream order as launches of sendrecv.cu."""

from __future__ import annotations

from collections.abc import Sequence

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Request
from mpicomm.collectives.gpu.algorithms.sendrecv.arguments import (
    SENDRECV_SLOT_NBYTES,
    SENDRECV_SLOTS,
    SendrecvArguments,
)
from mpicomm.collectives.gpu.algorithms.sendrecv.template import SendrecvTemplate
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import Team
from mpicomm.mpi.span import Span


def sendrecv_memory(size: int, channels: int) -> ChannelMemory:
    """Return the layout of each rank's memory for messages, with ``channels`` between every two ranks."""
    return ChannelMemory(size, channels, SENDRECV_SLOTS * SENDRECV_SLOT_NBYTES)


def sendrecv_request(layout: ChannelMemory) -> Request:
    """Return the request for memory with that layout."""
    slots_nbytes = layout.nbytes - layout.slots
    what = "messages in the order of streams"
    return Request(what, slots_nbytes, words_nbytes=layout.slots, holds_messages=True)


class SendrecvPlanner:
    """Makes launches of messages. Every kernel of this rank gets ``team``."""

    def __init__(self, team: Team, layout: ChannelMemory) -> None:
        self.layout = layout
        self.request = sendrecv_request(layout)
        self._empty = SendrecvArguments(
            team=team, credits=layout.credits, flags=layout.flags, slots=layout.slots, channels=layout.channels
        )

    def template(self, sent: Message | None, received: Message | None, memory: Sequence[int]) -> SendrecvTemplate:
        """Return the template for a message to a peer and a message from a peer.

        ``memory`` has the address of each rank's memory.
        """
        arguments = SendrecvArguments.from_buffer_copy(self._empty)
        arguments.memory[: len(memory)] = memory
        return SendrecvTemplate(arguments, self.layout.channels, sent, received)

    def launch(self, sent: Message | None, received: Message | None, memory: Sequence[int]) -> Launch | None:
        """Return the launch for two messages, as `template` takes them; None if both are empty."""
        template = self.template(sent, received, memory)
        send, receive = (Span(0, 0) if message is None else message.span for message in (sent, received))
        filled = template.fill(send.pointer, send.count, receive.pointer, receive.count)
        return None if filled is None else Launch(template.variant(None), template.arguments, *filled[1:])
