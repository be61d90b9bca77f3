"""Messages in stream order as launches of sendrecv.cu."""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

from mpicomm.collectives.exchange import Message
from mpicomm.collectives.gpu.algorithms.base import Filled, KernelTemplate
from mpicomm.collectives.gpu.algorithms.chunks.plan import CHANNEL_NBYTES, stride_of, threads_for
from mpicomm.collectives.gpu.algorithms.memory import ChannelMemory, Domain, Request
from mpicomm.kernels.reductions import OPTIONS
from mpicomm.kernels.team import MAX_RANKS, Team
from mpicomm.kernels.variant import Variant, u32, u64

# Constants and structures of sendrecv.cu; a test compares them.
SENDRECV_THREADS = 256
SENDRECV_BLOCKS = 2
"""The fewest blocks that a multiprocessor holds."""
SENDRECV_SLOTS = 4
SENDRECV_PART_NBYTES = 4 * 1024
SENDRECV_CHUNK_SLOTS = 2
SENDRECV_CHUNK_NBYTES = 64 * 1024
_CHANNEL_NBYTES = SENDRECV_SLOTS * 2 * SENDRECV_PART_NBYTES + SENDRECV_CHUNK_SLOTS * SENDRECV_CHUNK_NBYTES
"""The slots of a channel: half of a packet is data."""


class SendrecvSide(ctypes.Structure):
    """The host's copy of ``Side`` in sendrecv.cu: a message that this rank sends or receives."""

    _fields_ = [*u64("pointer", "nbytes", "stride"), *u32("peer", "blocks", "tag", "mask")]


class SendrecvArguments(ctypes.Structure):
    """The host's copy of ``Sendrecv`` in sendrecv.cu."""

    _fields_ = [
        ("team", Team),
        ("sent", SendrecvSide),
        ("received", SendrecvSide),
        ("memory", ctypes.c_uint64 * MAX_RANKS),
        *u64("credits", "flags", "slots"),
        *u32("channels", "unused"),
    ]


SENDRECV_KERNEL = Variant(Path(__file__).with_name("sendrecv.cu"), "mpicomm_sendrecv", OPTIONS)


_AT_SIDES: int = SendrecvArguments.sent.offset
_SIDES = struct.Struct("=3Q4I3Q4I")  # two of `SendrecvSide`, which lie one after the other
_half_of = struct.Struct("<Q").pack
_Side = tuple[int, int, int, int, int, int, int]
_NOTHING: _Side = 0, 0, 0, 0, 0, 0, 0


def sendrecv_memory(size: int, channels: int) -> ChannelMemory:
    """Return the layout of each rank's memory for messages, with ``channels`` between every two ranks."""
    return ChannelMemory(size, channels, _CHANNEL_NBYTES)


def sendrecv_request(layout: ChannelMemory) -> Request:
    """Return the request for memory with that layout."""
    what = "messages in the order of streams"
    return Request(what, layout.slots_nbytes, words_nbytes=layout.slots, holds_messages=True)


class SendrecvTemplate(KernelTemplate):
    """Launches for a message to the peer of ``sent`` and a message from the peer of ``received``, with their tags.

    Either is None if there is no such message. ``memory`` has the address of each rank's memory, with the ``layout``.
    `fill` writes one call into `arguments`. The next `fill` overwrites it, so a caller launches the kernel in between.
    """

    def __init__(
        self,
        domain: Domain,
        layout: ChannelMemory,
        memory: Sequence[int],
        sent: Message | None,
        received: Message | None,
    ) -> None:
        self._channels = layout.channels
        self.early = domain.early
        self.arguments = SendrecvArguments(
            team=domain.team, credits=layout.credits, flags=layout.flags, slots=layout.slots, channels=layout.channels
        )
        self.arguments.memory[: len(memory)] = memory
        self._ends = _end(sent), _end(received)

    def variant(self, kernel: None) -> Variant:
        return SENDRECV_KERNEL

    def fill(self, send: int, send_nbytes: int, receive: int, receive_nbytes: int) -> Filled:
        """Write a call into `arguments`; local. There are no blocks if both messages are empty."""
        to, of = self._ends
        sent, received = self._side(send, send_nbytes, *to), self._side(receive, receive_nbytes, *of)
        _SIDES.pack_into(self.arguments, _AT_SIDES, *sent, *received)
        # A packet for each thread, hence twice the data in packets.
        longest = 2 * min(max(sent[2], received[2]), SENDRECV_CHUNK_NBYTES)
        blocks = sent[4] + received[4]
        return None, blocks, threads_for(longest, SENDRECV_THREADS)

    def _side(self, pointer: int, nbytes: int, peer: int, tag: int, mask: int) -> _Side:
        """Return the fields of `SendrecvSide`."""
        if nbytes == 0:
            return _NOTHING
        # The cut depends only on the bytes and the layout, because both ranks must cut in the same way.
        part_nbytes = SENDRECV_PART_NBYTES if nbytes <= self._channels * SENDRECV_PART_NBYTES else CHANNEL_NBYTES
        stride = stride_of(nbytes, min(self._channels, -(-nbytes // part_nbytes)))
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
