"""Layouts of the memory that ranks open to each other's kernels: pure functions, so that all ranks have the same."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mpicomm.collectives.gpu.algorithms.chunks.arguments import SLOTS
from mpicomm.collectives.gpu.algorithms.direct.arguments import ARRIVALS_NBYTES
from mpicomm.collectives.gpu.algorithms.packets.arguments import FENCES_NBYTES, STAGES
from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES as PACKET_SLOT_NBYTES
from mpicomm.kernels.ll_flags import FlaggedInboxes
from mpicomm.kernels.team import HEAD_NBYTES, LINE_NBYTES, MAX_BLOCKS

PARITIES = 2
_FLAGGED_NBYTES = 2 << 20  # inboxes of one stage and parity
_SENTINEL_NBYTES = 8 << 20
_MOST_LARGE_NBYTES = 32 << 20


@dataclass(frozen=True)
class ChannelWords:
    """Where the words of channels are, from their start: a pure function of ranks and channels.

    First this rank's counts of chunks received from and sent to each rank, then the credit of each rank and the flags
    of each rank, all of it per channel.
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
        """All of them."""
        return self.flags + self.size * self.channels * LINE_NBYTES


@dataclass(frozen=True)
class ChannelMemory(ChannelWords):
    """Memory of a rank with channels of its own: their words, zero at first, then the slots of each."""

    channel_nbytes: int
    """Of the slots of one channel."""

    @property
    def slots(self) -> int:
        """The offset of the slots."""
        return self.words_nbytes

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.slots + self.size * self.channels * self.channel_nbytes


def escapes_nbytes(slots_nbytes: int) -> int:
    """Return the size of the escapes of slots of the sentinel wire, which follow them: a byte for each."""
    return slots_nbytes // PACKET_SLOT_NBYTES


@dataclass(frozen=True)
class ArenaLayout:
    """A pure function of ranks and channels, so that all ranks have the same.

    First the head and what blocks of direct.cu say of their arrival. Then what packets.cu needs: the inboxes of its LL
    wire, those of its sentinel wire, each for both parities, all stages and every rank, escapes for the latter, and the
    words of fences. Then what exchange.cu needs: `ChannelWords`. Its slots are memory of their own.
    """

    size: int
    channels: int

    @cached_property
    def flagged_inbox_nbytes(self) -> int:
        """The size of one inbox of the LL wire, half of which is data."""
        return self.inbox_nbytes(_FLAGGED_NBYTES)

    @cached_property
    def sentinel_inbox_nbytes(self) -> int:
        """The size of one inbox of the sentinel wire."""
        return self.inbox_nbytes(_SENTINEL_NBYTES)

    def inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one inbox where those of a stage and parity have so many bytes in all."""
        return nbytes // self.size // LINE_NBYTES * LINE_NBYTES

    def large_inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one inbox of those for ``nbytes`` from each rank: as much as that, or a part of it."""
        whole = -(-nbytes // LINE_NBYTES) * LINE_NBYTES  # as inboxes are: the size of none is less than is asked for
        return self.inbox_nbytes(min(_MOST_LARGE_NBYTES, 1 << (self.size * whole - 1).bit_length()))

    @property
    def most_inbox_nbytes(self) -> int:
        """The size of one inbox of the sentinel wire at most."""
        return self.inbox_nbytes(_MOST_LARGE_NBYTES)

    @property
    def arrivals(self) -> int:
        """The offset of what blocks of the other ranks say of their arrival."""
        return HEAD_NBYTES

    @property
    def flagged(self) -> int:
        """The offset of the inboxes of the LL wire."""
        return self.arrivals + self.size * ARRIVALS_NBYTES

    def flagged_inboxes(self, arena: int) -> FlaggedInboxes:
        """Return what kernels are told of the inboxes of the LL wire in the arena at that address."""
        return FlaggedInboxes(arena + self.flagged, STAGES * self.size * self.flagged_inbox_nbytes)

    @cached_property
    def sentinels(self) -> int:
        """The offset of the inboxes of the sentinel wire, which hold `ABSENT` at first; all else holds zeros."""
        return self.flagged + PARITIES * STAGES * self.size * self.flagged_inbox_nbytes

    @cached_property
    def escapes(self) -> int:
        """The offset of the escapes of the inboxes of the sentinel wire."""
        return self.sentinels + PARITIES * STAGES * self.size * self.sentinel_inbox_nbytes

    @cached_property
    def fences(self) -> int:
        """The offset of what the threads of each block of packets.cu tell each other of fences."""
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
    def slot_nbytes(self) -> int:
        """The size of a slot of exchange.cu: whole cache lines."""
        # Between two ranks a step moves one chunk each way, and of twice the size it takes 1 % less time for each byte.
        return 128 << 10 if self.size == 2 else 64 << 10

    @property
    def slots_nbytes(self) -> int:
        """The size of a rank's slots."""
        return self.size * self.channels * SLOTS * self.slot_nbytes


@dataclass(frozen=True)
class Inboxes:
    """Where every rank's inboxes of one wire begin, and the size of each."""

    pointers: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class Request:
    """Memory of the same size on every rank that a call needs beyond the arena: words, then slots.

    Words and slots hold zeros at first. Slots of the sentinel wire hold `ABSENT` instead, and their escapes follow
    them, a byte for each.
    """

    what: str
    """The purpose, as errors and ``info`` say it. Memory of one purpose is shared by all calls that fit into it."""
    slots_nbytes: int
    words_nbytes: int = 0
    sentinel: bool = False

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.words_nbytes + self.slots_nbytes + (escapes_nbytes(self.slots_nbytes) if self.sentinel else 0)


@dataclass(frozen=True)
class Region:
    """Memory of every rank that answers a `Request`: where it begins, and the size of its slots, or of larger ones."""

    pointers: tuple[int, ...]
    slots_nbytes: int


class Arena(Protocol):
    """The memory of the ranks of a node that kernels of all of them reach."""

    @property
    def layout(self) -> ArenaLayout:
        """The layout of each rank's arena."""

    @property
    def flagged(self) -> Inboxes:
        """The inboxes of the LL wire."""

    @property
    def sentinels(self) -> Inboxes:
        """The inboxes of the sentinel wire."""

    def region(self, request: Request) -> Region:
        """Return memory for a request. Collective where there is none yet, else local."""
