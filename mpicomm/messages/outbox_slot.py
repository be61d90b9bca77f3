"""The slot of a message in the outbox."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpicomm.devices.base import MessageCopy
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages import rendezvous_header
from mpicomm.messages.rendezvous_header import KNOWN_NBYTES, Places, counts_of, put_nbytes

LINE_NBYTES = 8 * MESSAGE_WORDS


# Slots compare by identity, and are not frozen, because every message takes an idle one or makes one.
@dataclass(slots=True, eq=False)
class OutboxSlot:
    """A range of the outbox, and its line of words. One message after the other uses it."""

    begin: int
    end: int
    places: Places
    """Where the range lies."""
    line: int
    """The number of its line."""
    ready: int
    """The address of the `ready` words of its line."""
    done: int
    """The address of the `done` words of its line."""
    last: int
    """The count of its words when the message has been copied."""
    message: list[Any]
    """The packed header, as MPI takes it."""
    nbytes: int = 0
    """The bytes of the message."""
    counts: int = 1
    """The number that both ranks add to the words."""
    copy_in: MessageCopy | None = None
    """The kernel launch that copies messages into the slot."""

    @property
    def pointer(self) -> int:
        """The address of a slot that lies in one block."""
        ((address, _),) = self.places
        return address

    def set_message(self, nbytes: int) -> None:
        """Give the slot to a message of ``nbytes`` bytes."""
        # MPI has sent the header of the last message, because its receiver has released the slot, or MPI has refused
        # it.
        put_nbytes(self.message[0], KNOWN_NBYTES, nbytes)
        self.nbytes = nbytes
        self.counts = 1 if nbytes <= rendezvous_header.KERNEL_NBYTES else counts_of(self.places, nbytes)
