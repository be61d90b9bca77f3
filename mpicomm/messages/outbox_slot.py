"""The slot of a message in the outbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpi4py import MPI

from mpicomm.devices.base import MessageCopy
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages import rendezvous_header
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, Extent, RendezvousHeader, pack_one

LINE_NBYTES = 8 * MESSAGE_WORDS

_packed = MPI.PACKED


# Slots compare by identity, and are not frozen, because every message makes one or takes an idle one.
@dataclass(slots=True, eq=False)
class OutboxSlot:
    """A range of the outbox, and its line of words. One message after the other uses it."""

    begin: int
    end: int
    extents: tuple[Extent, ...]
    """The whole range."""
    pointer: int
    """The address of the range; 0 if it lies in several blocks."""
    words: bytes
    """The packed handle of the block with the line."""
    line: int
    ready: int
    """The address of the `ready` words of its line."""
    done: int
    """The address of the `done` words of its line."""
    last: int
    """The count of its words when the message has been copied."""
    nbytes: int = 0
    """The bytes of the message."""
    message: list[Any] = field(default_factory=list)
    """The packed header, as MPI takes it."""
    counts: int = 1
    """The number that both ranks add to the words."""
    copy_in: MessageCopy | None = None
    """The kernel launch that copies messages into the slot."""

    @property
    def header(self) -> RendezvousHeader:
        """The rendezvous header of the message."""
        *whole, last = self.extents
        rest = self.nbytes - sum(extent.nbytes for extent in whole)  # the range is longer by less than the last extent
        extents = (*whole, Extent(last.packet, last.offset, rest))
        return RendezvousHeader(self.nbytes, self.words, self.line * LINE_NBYTES, extents)

    def set_message(self, nbytes: int, secret: bytes) -> None:
        """Give the slot to a message of ``nbytes`` bytes."""
        self.nbytes = nbytes
        if len(self.extents) == 1 and nbytes <= rendezvous_header.KERNEL_NBYTES:  # with few calls of Python
            (extent,) = self.extents
            packed = pack_one(secret, nbytes, self.line * LINE_NBYTES, self.words, extent.packet, extent.offset)
            self.counts = 1
        else:
            header = self.header
            packed, self.counts = header.pack(secret), header.counts
        # MPI.PACKED matches every type that the receiver names.
        self.message = [packed, HEADER_NBYTES, _packed]
