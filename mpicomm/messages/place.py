"""The place of a message in the outbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mpicomm.devices.base import MessageCopy
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages.description import Description, Extent

LINE_NBYTES = 8 * MESSAGE_WORDS


# Compared by identity, and not frozen, because every message makes one or takes one that is idle.
@dataclass(slots=True, eq=False)
class Place:
    """A range of the outbox, and its line of words. Its messages follow each other."""

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
    """The count that its words have when the message has been copied."""
    nbytes: int = 0
    """The bytes of the message."""
    message: list[Any] = field(default_factory=list)
    """The packed description as MPI takes it; empty without one."""
    described: Description = field(init=False)
    """The message."""
    counts: int = field(init=False)
    """How much both ranks add to the words."""
    copy_in: MessageCopy | None = None
    """Copies messages here, by a kernel."""

    def describe(self, nbytes: int) -> None:
        """Let the place have a message of ``nbytes`` bytes."""
        *whole, last = self.extents
        rest = nbytes - sum(extent.nbytes for extent in whole)  # the range is longer by less than the last extent
        extents = (*whole, Extent(last.packet, last.offset, rest))
        self.nbytes, self.message = nbytes, []
        self.described = Description(nbytes, self.words, self.line * LINE_NBYTES, extents)
        self.counts = self.described.counts
