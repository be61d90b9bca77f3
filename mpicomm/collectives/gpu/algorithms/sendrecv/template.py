"""SendrecvTemplate: launches of sendrecv.cu between the same ranks. A call fills in addresses and lengths."""

from __future__ import annotations

import struct
import zlib

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.chunks.template import CHANNEL_NBYTES, stride_of, threads_for
from mpicomm.collectives.gpu.algorithms.sendrecv.arguments import (
    SENDRECV_SLOT_NBYTES,
    SENDRECV_THREADS,
    SendrecvArguments,
    sendrecv_kernel,
)
from mpicomm.collectives.gpu.algorithms.template import Filled
from mpicomm.kernels.variant import Variant

_AT_SIDES: int = SendrecvArguments.sent.offset
_SIDES = struct.Struct("=3Q4I3Q4I")  # two of `SendrecvSide`, which lie one after the other
_half_of = struct.Struct("<Q").pack
_Side = tuple[int, int, int, int, int, int, int]
_NOTHING: _Side = 0, 0, 0, 0, 0, 0, 0


class SendrecvTemplate:
    """Launches for a message to the peer of ``sent`` and a message from the peer of ``received``, with their tags.

    Either is None if there is no such message. `fill` writes one call into ``arguments``. The next `fill` overwrites
    it, so a caller launches the kernel in between.
    """

    def __init__(
        self, arguments: SendrecvArguments, channels: int, sent: Message | None, received: Message | None
    ) -> None:
        self.arguments = arguments
        self._channels = channels
        self._ends = _end(sent), _end(received)

    early = False

    def variant(self, kernel: None) -> Variant:
        """See `Template`."""
        return sendrecv_kernel()

    def fill(self, send: int, send_nbytes: int, receive: int, receive_nbytes: int) -> Filled | None:
        """Write a call into `arguments`; local. Return None if both messages are empty."""
        to, of = self._ends
        sent, received = self._side(send, send_nbytes, *to), self._side(receive, receive_nbytes, *of)
        _SIDES.pack_into(self.arguments, _AT_SIDES, *sent, *received)
        longest = min(max(sent[2], received[2]), SENDRECV_SLOT_NBYTES)
        blocks = sent[4] + received[4]
        return (None, blocks, threads_for(longest, SENDRECV_THREADS)) if blocks else None

    def _side(self, pointer: int, nbytes: int, peer: int, tag: int, mask: int) -> _Side:
        """Return the fields of `SendrecvSide`."""
        if nbytes == 0:
            return _NOTHING
        # The cut depends only on the bytes and the layout, because both ranks must cut alike.
        stride = stride_of(nbytes, min(self._channels, -(-nbytes // CHANNEL_NBYTES)))
        return pointer, nbytes, stride, peer, -(-nbytes // stride), _half(nbytes) << 16 | tag, mask


def _end(message: Message | None) -> tuple[int, int, int]:
    """Return the peer of a message, its tag in 16 bits, and the bits of the tag of a packet that must match."""
    if message is None:
        return 0, 0, 0
    if message.tag is None:
        return message.peer, 0, 0xFFFF0000
    return message.peer, _half(message.tag), 0xFFFFFFFF


def _half(number: int) -> int:
    return zlib.crc32(_half_of(number)) & 0xFFFF
