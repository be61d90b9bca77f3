"""Domain: the ranks of a peer domain, and the layouts of the memory that they open to each other's kernels.

Layouts are pure functions of facts that all ranks know, so all ranks have the same layouts.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mpicomm.collectives.gpu.algorithms.packets.arguments import FENCES_NBYTES, STAGES
from mpicomm.collectives.gpu.algorithms.packets.arguments import SLOT_NBYTES as PACKET_SLOT_NBYTES
from mpicomm.kernels.team import ARENA_HEADER_NBYTES, LINE_NBYTES, MAX_BLOCKS, LLInboxes, Team
from mpicomm.sharing.segments import Mapped

Range = tuple[int, int]

PARITIES = 2
CHUNK_SLOTS = 2  # kSlots in exchange.cu; a test compares them
ARRIVALS_NBYTES = MAX_BLOCKS * 8
"""The size of the arrival words of one peer for direct.cu, one for each block."""
_LL_NBYTES = 2 << 20  # all inboxes of one stage and parity
_SENTINEL_NBYTES = 9 << 20  # both stages together have laps for all 736 workers of a block between 2 ranks
_MOST_LARGE_NBYTES = 32 << 20


def whole_lines(nbytes: int) -> int:
    """Return the bytes of whole cache lines that hold ``nbytes``."""
    return -(-nbytes // LINE_NBYTES) * LINE_NBYTES


class ChannelMemory:
    """The memory of a rank for the channels of one kernel: their words, which are zero at first, then their slots.

    First come this rank's counts of chunks received from each rank and sent to each rank. Then come the credits of each
    rank, then the flags of each rank. All of them are per channel.
    """

    def __init__(self, size: int, channels: int, channel_nbytes: int = 0) -> None:
        self.size, self.channels, self.channel_nbytes = size, channels, channel_nbytes
        self.credits = whole_lines(2 * size * channels * 4)
        self.flags = self.credits + size * channels * LINE_NBYTES
        """The offsets of the credits and of the flags."""
        self.slots = self.flags + size * channels * LINE_NBYTES
        """The offset of the slots, hence the size of all words."""
        self.slots_nbytes = size * channels * channel_nbytes


def escapes_nbytes(slots_nbytes: int) -> int:
    """Return the size of the escapes of sentinel slots: a byte for each slot, after all slots."""
    return slots_nbytes // PACKET_SLOT_NBYTES


class ArenaLayout:
    """The layout of each rank's arena: offsets in bytes, and sizes."""

    def __init__(self, size: int, channels: int) -> None:
        self.size, self.channels = size, channels
        self.arrivals = ARENA_HEADER_NBYTES
        """The words that blocks of peers write when they arrive: see direct.cu."""
        inboxes = PARITIES * STAGES * size
        self.ll = self.arrivals + size * ARRIVALS_NBYTES
        """The inboxes of the LL protocol, for both parities, all stages and every rank."""
        self.sentinels = self.ll + inboxes * self.ll_inbox_nbytes
        """The inboxes of the sentinel protocol. They hold `ABSENT` at first; all other memory is zero."""
        self.escapes = self.sentinels + inboxes * self.sentinel_inbox_nbytes
        self.absent: Range = self.sentinels, self.escapes
        self.fences = whole_lines(self.escapes + escapes_nbytes(self.escapes - self.sentinels))
        """The words for fences between the threads of a block of packets.cu."""
        words = ChannelMemory(size, channels)
        self.counts = self.fences + MAX_BLOCKS * FENCES_NBYTES
        """The words of the channels of exchange.cu. Its slots are an `ArenaRegion`."""
        self.credits, self.flags = self.counts + words.credits, self.counts + words.flags
        self.nbytes = self.counts + words.slots
        # Between two ranks a step moves one chunk each way. A chunk of twice the size takes 1 % less time for each
        # byte.
        self.slot_nbytes = 128 << 10 if size == 2 else 64 << 10
        """The size of a slot of exchange.cu: whole cache lines."""
        self.slots_nbytes = size * channels * CHUNK_SLOTS * self.slot_nbytes
        self.most_inbox_nbytes = self.inbox_nbytes(_MOST_LARGE_NBYTES)

    @cached_property
    def ll_inbox_nbytes(self) -> int:
        """The size of one inbox of the LL protocol. Half of it is data."""
        return self.inbox_nbytes(_LL_NBYTES)

    @cached_property
    def sentinel_inbox_nbytes(self) -> int:
        """The size of one inbox of the sentinel protocol."""
        return self.inbox_nbytes(_SENTINEL_NBYTES)

    def inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one inbox if all inboxes of a stage and parity together have ``nbytes``."""
        return nbytes // self.size // LINE_NBYTES * LINE_NBYTES

    def large_inbox_nbytes(self, nbytes: int) -> int:
        """Return the size of one large inbox for ``nbytes`` from each rank: at least ``nbytes``, up to a limit."""
        # Inboxes are whole cache lines, so round up before the cut.
        return self.inbox_nbytes(min(_MOST_LARGE_NBYTES, 1 << (self.size * whole_lines(nbytes) - 1).bit_length()))

    def ll_inboxes(self, arena: int) -> LLInboxes:
        """Return the inboxes of the LL protocol in the arena at address ``arena``, as an argument for kernels."""
        return LLInboxes(arena + self.ll, STAGES * self.size * self.ll_inbox_nbytes)


@dataclass(frozen=True)
class Inboxes:
    """The address at which each rank's inboxes of one protocol begin, and the size of one inbox."""

    pointers: tuple[int, ...]
    nbytes: int
    stages: int = STAGES
    """The inboxes for one source and parity."""


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

    layout: ArenaLayout
    ll: Inboxes
    sentinels: Inboxes

    def has(self, request: Request) -> bool:
        """Return whether there is memory for a request; local, the same on all ranks."""

    def region(self, request: Request) -> ArenaRegion:
        """Return the smallest region that a request fits into, which `has` has found. Local."""


_TAG = struct.Struct("<IIIQ")


@dataclass(frozen=True)
class Domain:
    """The ranks of a peer domain, and this rank. All fields except ``team`` are equal on all ranks."""

    team: Team
    """The first argument of every kernel of this rank."""
    arena: Arena
    multiprocessors: int
    """The fewest blocks that run at once on each device."""
    link_speed: float = 1.0
    """The speed of the slowest link, relative to the links on which built-in sizes were measured."""
    most_staged_nbytes: int = 0
    """The most memory of each rank in which copy engines may stage data."""
    early: bool = True
    """Whether kernels take programmatic dependent launch: blocks may be set up before the previous kernel has ended."""
    host_slots: bool = False
    """Whether the ranks' arenas lie in host memory."""

    @property
    def rank(self) -> int:
        """This rank's index in the domain."""
        return int(self.team.rank)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return int(self.team.size)

    @property
    def most_blocks(self) -> int:
        """The most blocks of a launch, because all of them must run at once; an H200 has 132 multiprocessors."""
        return min(128, self.multiprocessors)


def launch_tag(hash32: int, step: int = 0, memory: Mapped | None = None) -> int:
    """Return a number made of the facts in which ranks must agree in one launch.

    ``hash32`` is `Signature.hash32`, and ``step`` is the number of the launch in its call. The ranks store into
    ``memory``, if it is not None.
    """
    if memory is not None:
        return zlib.crc32(_TAG.pack(hash32, step, memory.array, memory.offset))
    return zlib.crc32(_TAG.pack(hash32, step, 0, 0)) if step else hash32


def with_place(text: str, place: Mapped | str) -> str:
    """Return the text of a call with the place in symmetric memory into which ranks store."""
    return f"{text}, into {place}"
