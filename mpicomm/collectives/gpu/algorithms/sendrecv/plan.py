"""Messages in stream order as launches of sendrecv.cu."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.chunks.template import CHANNEL_NBYTES, stride_of, threads_for
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Request
from mpicomm.collectives.gpu.algorithms.sendrecv.arguments import (
    SENDRECV_SLOT_NBYTES,
    SENDRECV_SLOTS,
    SENDRECV_THREADS,
    SendrecvArguments,
    SendrecvSide,
    sendrecv_kernel,
)
from mpicomm.collectives.gpu.algorithms.steps import Launch
from mpicomm.kernels.team import Team


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

    def launch(self, sent: Message | None, received: Message | None, memory: Sequence[int]) -> Launch | None:
        """Return the launch for a message to a peer and a message from a peer; None if both are empty.

        ``memory`` has the address of each rank's memory.
        """
        arguments = SendrecvArguments.from_buffer_copy(self._empty)
        arguments.memory[: len(memory)] = memory
        sides = arguments.sent, arguments.received
        for side, message in zip(sides, (sent, received), strict=True):
            if message is not None and message.span.count > 0:
                self._fill(side, message)
        blocks = sum(side.blocks for side in sides)
        if blocks == 0:
            return None
        longest = min(max(side.stride for side in sides), SENDRECV_SLOT_NBYTES)
        return Launch(sendrecv_kernel(), arguments, blocks=blocks, threads=threads_for(longest, SENDRECV_THREADS))

    def _fill(self, side: SendrecvSide, message: Message) -> None:
        nbytes = message.span.count
        side.pointer, side.nbytes, side.peer = message.span.pointer, nbytes, message.peer
        # The cut depends only on the bytes and the layout, because both ranks must cut alike.
        side.stride = stride_of(nbytes, min(self.layout.channels, -(-nbytes // CHANNEL_NBYTES)))
        side.blocks = -(-nbytes // side.stride)
        side.tag = _half(nbytes) << 16 | (0 if message.tag is None else _half(message.tag))
        side.mask = 0xFFFF0000 if message.tag is None else 0xFFFFFFFF


def _half(number: int) -> int:
    return zlib.crc32(struct.pack("<Q", number)) & 0xFFFF
