"""The places where copies land: in symmetric output at once, or in staging memory, which is unloaded later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from mpicomm.collectives.exchange import Exchange
from mpicomm.mpi.arguments import Span
from mpicomm.symmetric.registry import Mapped

REGIONS = 3
"""One region in which a part arrives, one region that is read, and one region that some rank may still read."""
ALIGNED_NBYTES = 256


def landing_place(exchange: Exchange, peer: int, memory: Mapped, base: int) -> int:
    """Return the address, as mapped here, where the data for ``peer`` belongs in the output of ``peer``.

    ``memory`` begins at address ``base`` on this rank.
    """
    assert exchange.lands is not None
    span = exchange.lands[peer]
    assert span is not None
    return memory.pointers[peer] + span.pointer - base


@dataclass(frozen=True)
class Parts:
    """The cut of the messages of an exchange into parts.

    ``bounds`` has the offsets in the longest message at which parts begin, and the end of that message.
    """

    bounds: tuple[int, ...]

    @staticmethod
    def equal(longest_nbytes: int, number: int) -> Parts:
        """Return ``number`` parts, or fewer."""
        step = aligned(-(-longest_nbytes // number))
        return Parts((*range(0, longest_nbytes, step), longest_nbytes))

    @staticmethod
    def tapered(longest_nbytes: int, largest_nbytes: int, smallest_nbytes: int) -> Parts:
        """Return parts of up to ``largest_nbytes``. The last parts shrink: each is two thirds of the rest."""
        bounds = [0]
        last = max(min(largest_nbytes, smallest_nbytes), 3 * ALIGNED_NBYTES)  # two thirds of more, rounded up, are less
        while (rest := longest_nbytes - bounds[-1]) > last:
            bounds.append(bounds[-1] + min(aligned(largest_nbytes), aligned(rest * 2 // 3)))
        return Parts((*bounds, longest_nbytes))

    @property
    def number(self) -> int:
        """The number of parts."""
        return len(self.bounds) - 1

    @cached_property
    def largest_nbytes(self) -> int:
        """The size of the largest part, rounded up."""
        return aligned(max(end - begin for begin, end in itertools.pairwise(self.bounds)))

    @cached_property
    def room_nbytes(self) -> int:
        """The staging memory for one peer: as large as the message, or `REGIONS` regions that parts reuse."""
        return min(aligned(self.bounds[-1]), REGIONS * self.largest_nbytes)

    def cut(self, span: Span | None, part: int, itemsize: int) -> tuple[int, int]:
        """Return the offset in ``span`` at which a part begins, and its bytes; 0 bytes if ``span`` ends before it."""
        if span is None or not 0 <= part < self.number:
            return 0, 0
        begin, end = (min(bound, span.count * itemsize) for bound in self.bounds[part : part + 2])
        return begin, end - begin


class Landing(Protocol):
    """The places where the parts of an exchange land."""

    def target(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        """Return the address, as mapped here, at which a part for ``peer`` lands; ``begin`` is as in `Parts.cut`."""

    def landed(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        """Return the address at which a part from ``peer`` has landed on this rank."""


@dataclass(frozen=True)
class InOutput:
    """A `Landing` in the output of all ranks, which is symmetric memory: data lands where it belongs."""

    rank: int
    memory: Mapped

    def target(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        return landing_place(exchange, peer, self.memory, self.memory.pointers[self.rank]) + begin

    def landed(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        received = exchange.receives[peer]
        assert received is not None
        return received.pointer + begin


@dataclass(frozen=True)
class InStaging:
    """A `Landing` in staging memory. Every rank has a part of this memory for each peer.

    ``pointers`` has the address of each rank's staging memory.
    """

    rank: int
    pointers: Sequence[int]
    parts: Parts

    def target(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        return self._place(self.rank, peer, part)

    def landed(self, exchange: Exchange, peer: int, part: int, begin: int) -> int:
        return self._place(peer, self.rank, part)

    def _place(self, source: int, owner: int, part: int) -> int:
        size, parts = len(self.pointers), self.parts
        room = (source - owner - 1) % size
        whole = parts.bounds[-1] <= parts.room_nbytes
        offset = parts.bounds[part] if whole else part % REGIONS * parts.largest_nbytes
        return self.pointers[owner] + room * parts.room_nbytes + offset


def aligned(nbytes: int) -> int:
    """Return the next multiple of `ALIGNED_NBYTES`."""
    return -(-nbytes // ALIGNED_NBYTES) * ALIGNED_NBYTES
