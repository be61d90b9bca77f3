"""Layouts of the memory that ranks open to each other's kernels.

Layouts are pure functions of facts that all ranks know, so all ranks have the same layouts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mpicomm.collectives.gpu.algorithms.chunks.arguments import SLOTS
from mpicomm.collectives.gpu.algorithms.direct.arguments import ARRIVALS_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.arguments import FENCES_NBYTES, STAGES
from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES as PACKET_SLOT_NBYTES
from mpicomm.kernels.team import HEAD_NBYTES, LINE_NBYTES, MAX_BLOCKS, FlaggedInboxes

Range = tuple[int, int]
"""The begin and the end of a range of bytes."""

PARITIES = 2
_FLAGGED_NBYTES = 2 << 20  # all inboxes of one stage and parity
_SENTINEL_NBYTES = 8 << 20
_MOST_LARGE_NBYTES = 32 << 20


@dataclass(frozen=True)
class ChannelWords:
    """The offsets of the words of channels, in bytes.

    First come this rank's counts of chunks received from each rank and sent to each rank. Then come the credits of each
    rank, then the flags of each rank. All of them are per channel.
    """

    size: int
    channels: int

    @property
    def credits(self) -> int:
        """The offset of the credits."""
        return -(-2 * self.size * self.channels * 4 // LINE_NBYTES) * LINE_NBYTES

    @property
    def flags(self) -> int:
        """The offset of the flags."""
        return self.credits + self.size * self.channels * LINE_NBYTES

    @property
    def words_nbytes(self) -> int:
        """The size of all words."""
        return self.flags + self.size * self.channels * LINE_NBYTES


@dataclass(frozen=True)
class ChannelMemory(ChannelWords):
    """The memory of a rank for the channels of one kernel: their words, which are zero at first, then their slots."""

    channel_nbytes: int
    """The size of the slots of one channel."""

    @property
    def slots(self) -> int:
        """The offset of the slots."""
        return self.words_nbytes

    @property
    def nbytes(self) -> int:
        """The size of words and slots."""
        return self.slots + self.size * self.channels * self.channel_nbytes


def escapes_nbytes(slots_nbytes: int) -> int:
    """Return the size of the escapes of sentinel slots: a byte for each slot, after all slots."""
    return slots_nbytes // PACKET_SLOT_NBYTES


@dataclass(frozen=True)
class ArenaLayout:
    """The layout of each rank's arena.

    First come the head and the arrival words of direct.cu. Then comes the memory of packets.cu: the inboxes of the LL
    protocol and the inboxes of the sentinel protocol, each for both parities, all stages and every rank; the escapes of
    the sentinel protocol; and the words of fences. Last come the `ChannelWords` of exchange.cu. Its slots are an
    `ArenaRegion`.
    """

    size: int
    channels: int

    @cached_property
    def flagged_inbox_nbytes(self) -> int:
        """The size of one inbox of the LL protocol. Half of it is data."""
        return self.inbox_nbytes(_FLAGGED_NBYTES)

    @cached_property
    def sentinel_inbox_nbytes(self) -> int:
        """The size of one inbox of the sentinel protocol."""
        return self.inbox_nbytes(_SENTINEL_NBYTES)

    def inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one inbox if all inboxes of a stage and parity together have ``nbytes``."""
        return nbytes // self.size // LINE_NBYTES * LINE_NBYTES

    def large_inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one large inbox for ``nbytes`` from each rank: at least ``nbytes``, up to a limit."""
        whole = -(-nbytes // LINE_NBYTES) * LINE_NBYTES  # inboxes are whole cache lines, so round up before the cut
        return self.inbox_nbytes(min(_MOST_LARGE_NBYTES, 1 << (self.size * whole - 1).bit_length()))

    @property
    def large_inboxes_nbytes(self) -> list[int]:
        """The sizes that large inboxes of the sentinel protocol may have, the smallest first."""
        doublings = (_MOST_LARGE_NBYTES // _SENTINEL_NBYTES).bit_length()
        return [self.inbox_nbytes(_SENTINEL_NBYTES << number) for number in range(1, doublings)]

    @property
    def most_inbox_nbytes(self) -> int:
        """The largest size of one inbox of the sentinel protocol."""
        return self.inbox_nbytes(_MOST_LARGE_NBYTES)

    @property
    def arrivals(self) -> int:
        """The offset of the words that blocks of peers write when they arrive."""
        return HEAD_NBYTES

    @property
    def flagged(self) -> int:
        """The offset of the inboxes of the LL protocol."""
        return self.arrivals + self.size * ARRIVALS_NBYTES

    def flagged_inboxes(self, arena: int) -> FlaggedInboxes:
        """Return the inboxes of the LL protocol in the arena at address ``arena``, as an argument for kernels."""
        return FlaggedInboxes(arena + self.flagged, STAGES * self.size * self.flagged_inbox_nbytes)

    @cached_property
    def sentinels(self) -> int:
        """The offset of the inboxes of the sentinel protocol. They hold `ABSENT` at first; all other memory is zero."""
        return self.flagged + PARITIES * STAGES * self.size * self.flagged_inbox_nbytes

    @cached_property
    def escapes(self) -> int:
        """The offset of the escapes of the inboxes of the sentinel protocol."""
        return self.sentinels + PARITIES * STAGES * self.size * self.sentinel_inbox_nbytes

    @cached_property
    def fences(self) -> int:
        """The offset of the words for fences between the threads of a block of packets.cu."""
        return -(-(self.escapes + escapes_nbytes(self.escapes - self.sentinels)) // LINE_NBYTES) * LINE_NBYTES

    @cached_property
    def counts(self) -> int:
        """The offset of the counts."""
        return self.fences + MAX_BLOCKS * FENCES_NBYTES

    @cached_property
    def credits(self) -> int:
        """The offset of the credits."""
        return self.counts + self._words.credits

    @cached_property
    def flags(self) -> int:
        """The offset of the flags."""
        return self.counts + self._words.flags

    @cached_property
    def nbytes(self) -> int:
        """The size of an arena."""
        return self.counts + self._words.words_nbytes

    @cached_property
    def _words(self) -> ChannelWords:
        return ChannelWords(self.size, self.channels)

    @property
    def absent(self) -> Range:
        """The bytes that hold `ABSENT` at first."""
        return self.sentinels, self.escapes

    @property
    def slot_nbytes(self) -> int:
        """The size of a slot of exchange.cu: whole cache lines."""
        # Between two ranks a step moves one chunk each way. A chunk of twice the size takes 1 % less time for each
        # byte.
        return 128 << 10 if self.size == 2 else 64 << 10

    @property
    def slots_nbytes(self) -> int:
        """The size of a rank's slots."""
        return self.size * self.channels * SLOTS * self.slot_nbytes


@dataclass(frozen=True)
class Inboxes:
    """The address at which each rank's inboxes of one protocol begin, and the size of one inbox."""

    pointers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Request:
    """Memory of the same size on every rank that a call needs beyond the arena: words, then slots.

    Words and slots hold zeros at first. Slots of the sentinel protocol hold `ABSENT` instead. Their escapes, a byte for
    each slot, follow them.
    """

    what: str
    """The purpose, as errors and ``info`` name it. All calls that fit into memory of one purpose share that memory."""
    slots_nbytes: int
    words_nbytes: int = 0
    sentinel: bool = False
    holds_messages: bool = False
    """Whether slots may hold data between calls: a message that the sender has sent, and no rank has received."""

    @property
    def absent(self) -> Range:
        """The bytes that hold `ABSENT` at first."""
        return self.words_nbytes, self.words_nbytes + (self.slots_nbytes if self.sentinel else 0)

    @property
    def nbytes(self) -> int:
        """The size of words, slots and escapes."""
        return self.words_nbytes + self.slots_nbytes + (escapes_nbytes(self.slots_nbytes) if self.sentinel else 0)


@dataclass(frozen=True)
class ArenaRegion:
    """Memory of every rank for a `Request`: its addresses, and the size of its slots, at least the requested size."""

    pointers: tuple[int, ...]
    slots_nbytes: int


class Arena(Protocol):
    """The memory that each rank of a node opens to the kernels of all ranks."""

    @property
    def layout(self) -> ArenaLayout:
        """The layout of each rank's arena."""

    @property
    def flagged(self) -> Inboxes:
        """The inboxes of the LL protocol."""

    @property
    def sentinels(self) -> Inboxes:
        """The inboxes of the sentinel protocol."""

    @property
    def any_length(self) -> Inboxes:
        """The inboxes for messages with a length that only two ranks know: `sentinels`, or larger inboxes."""

    def has(self, request: Request) -> bool:
        """Return whether there is memory for a request; local, the same on all ranks."""

    def region(self, request: Request) -> ArenaRegion:
        """Return memory for a request; collective if the ranks have to set it up, else local."""
