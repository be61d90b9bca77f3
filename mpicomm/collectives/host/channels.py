"""Channels: messages of up to a slot's size from each rank of a node to each other one, through shared host memory.

Every rank has an arena that all map. Its *slots* hold what this rank sends: it copies a chunk in once, however many
ranks read it. Its *inbox* has, for every other rank, a ring of entries in which that rank says where in its slots to
read and how long the message is. Its *returns* say how many of its messages each reader is done with, which frees the
slots they are in.

    sender                                        reader
    wait for a slot nobody reads any more
    copy the chunk into the slot
    fence                                     (A)
    entry.content, fence, entry.flag          (B) poll entry.flag, fence
                                                  read the chunk
                                                  fence
    see the count of the reader, fence        (C) write its count of messages read

(A, B) publish the chunk: without the fences a reader could see the flag and an older place or older bytes of the slot.
(C) gives the slot back: without the fences the sender's next chunk could be seen by a reader that still reads this one.
Every word has one writer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.collectives.host.verdict import Verdict
from mpicomm.devices.host import HostBackend, fence
from mpicomm.sharing.segments import share
from mpicomm.waiting import wait_until

_WORD = 8
_LINE = 128  # bytes; words with different writers are on different cache lines, and on different pairs of lines
_PAGE = 4096
_EPOCHS = 2**32 - 1
_PATIENCE_S = 0.5
_PLACE_BITS = 32  # of the word that says where in the arena a message is; the others say how long it is
_PLACE_MASK = (1 << _PLACE_BITS) - 1
# Copies take up to twice as long where source and target are at different places in their cache lines. NumPy's large
# arrays are 16 bytes past the start of one; in steps of 16 every element type stays aligned.
_CACHE_LINE = 64
_ALIGNMENT = 16


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class LateRank(Exception):
    """The rank with this index in the node did not do in time what this rank waits for."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class DifferentCall(Exception):
    """What a rank sent belongs to another call than the one this rank is in."""


class DifferentSize(Exception):
    """A rank sent as many bytes as this rank does not expect from it."""

    def __init__(self, index: int, sent: int, expected: int) -> None:
        super().__init__(index, sent, expected)
        self.index, self.sent, self.expected = index, sent, expected


class GivenUp(Exception):
    """There is a verdict: nothing more will come."""


class Channels:
    """This rank's ends of the channels of a node. Construction is collective and raises as `share` does.

    Per pair of ranks messages are read in the order they were sent. What blocks raises `LateRank` after the node's
    ``timeout_s`` seconds without progress, or soon where ``in_vain`` says that nothing will come, and `GivenUp` when
    there is a verdict. ``first`` is how many messages count as sent and read on every channel before the first one, the
    same on all ranks.
    """

    def __init__(
        self, node: Group, slot_nbytes: int, slots: int, first: int = 0, in_vain: Callable[[], bool] = lambda: False
    ) -> None:
        self._rank = node.rank
        self._node = node
        self._in_vain = in_vain
        # On a channel every unread message holds a slot. With an entry for each, none is written over before it is
        # read, and nobody has to wait for one.
        self._entries = 1 << (slots - 1).bit_length()
        inbox_nbytes = _round_up(self._entries * 2 * _WORD, _LINE)
        self._inbox_words = inbox_nbytes // _WORD
        self._returns_at = node.size * self._inbox_words
        verdict_at = node.size * (inbox_nbytes + _LINE)
        slots_at = _round_up(verdict_at + Verdict.nbytes(node.size), _PAGE)
        self._stride = _round_up(slot_nbytes, _CACHE_LINE) + _CACHE_LINE
        nbytes = slots_at + slots * self._stride
        backend = HostBackend(node.timeout_s)
        self._segments = share(
            node, backend, "host arena", lambda: backend.allocate("memfd", nbytes), lambda: (slot_nbytes, slots, first)
        )
        views = [backend.view(self._segments[index], (nbytes,), np.dtype(np.uint8)) for index in range(node.size)]
        self._addresses = [view.ctypes.data + slots_at for view in views]
        self._words = [view[:slots_at].data.cast("Q") for view in views]
        self.verdict = Verdict(node, views[0][verdict_at:slots_at].data)
        self._sent = [first] * node.size
        self._read = [first] * node.size
        # Per slot, who reads it, and how many messages of this rank's each has read when it is done with it.
        self._readers: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self._next_slot = 0
        self.hash32 = 0
        """What the call all ranks are in hashes to; it travels with every message."""

    def send(self, pointer: int, nbytes: int, readers: Sequence[int]) -> None:
        """Send up to a slot's size of bytes to some ranks; blocks for a free slot, and until they are copied."""
        slot = self._await_free_slot()
        place = slot * self._stride + pointer % _CACHE_LINE // _ALIGNMENT * _ALIGNMENT
        ctypes.memmove(self._addresses[self._rank] + place, pointer, nbytes)
        self._readers[slot] = self._announce(readers, place, nbytes)

    def receive(self, source: int, nbytes: int) -> int:
        """Return the address of the next message of a rank; blocks. It stays there until `release`.

        Raises `DifferentCall` if the message belongs to another call, `DifferentSize` if it has other than ``nbytes``.
        """
        self._read[source] = number = self._read[source] + 1
        words = self._words[self._rank]
        entry = self._entry(source, number)
        flag = self._flag(number)
        if words[entry] != flag:
            epoch = flag & _EPOCHS
            self._await(lambda: words[entry] & _EPOCHS == epoch, source)
            if words[entry] != flag:
                raise DifferentCall
        # (B) Pairs with the fence in `_announce`: place and content are read after the flag.
        fence()
        content = words[entry + 1]
        if content >> _PLACE_BITS != nbytes:
            raise DifferentSize(source, content >> _PLACE_BITS, nbytes)
        return self._addresses[source] + (content & _PLACE_MASK)

    def release(self, sources: Iterable[int]) -> None:
        """Say that the last message of each of these ranks is not needed any more; local."""
        # (C) Pairs with the fence in `send`: the content was read before the count that lets it be written over.
        fence()
        for source in sources:
            self._words[source][self._returns_at + self._rank * _LINE // _WORD] = self._read[source]

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. Nothing can be sent or received any more."""
        self._words.clear()
        self._addresses.clear()
        self.verdict.close()
        self._segments.close_peers()

    def close_own(self) -> None:
        """Free this rank's arena; local, after every peer's `close_peers`."""
        self._segments.close_own()

    def _announce(self, readers: Sequence[int], place: int, nbytes: int) -> list[tuple[int, int]]:
        """Say where in this rank's slots a message is and return its number on each channel; never blocks."""
        numbers = []
        for reader in readers:
            self._sent[reader] = number = self._sent[reader] + 1
            self._words[reader][self._entry(self._rank, number) + 1] = nbytes << _PLACE_BITS | place
            numbers.append((reader, number))
        # (A), (B) Pairs with the fence in `receive`: content and place are there before the flag that says so.
        fence()
        for reader, number in numbers:
            self._words[reader][self._entry(self._rank, number)] = self._flag(number)
        return numbers

    def _entry(self, source: int, number: int) -> int:
        return source * self._inbox_words + 2 * (number % self._entries)

    def _flag(self, number: int) -> int:
        # Never 0, which is what an entry holds that was never written. An entry's flags follow each other at intervals
        # of `entries`, so the epoch may wrap: it is only compared with the one that has to come next.
        return self.hash32 << 32 | 1 + number % _EPOCHS

    def _await_free_slot(self) -> int:
        """Return the slot that was used longest ago, when all its readers are done with it."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._readers)
        words = self._words[self._rank]
        for reader, number in self._readers[slot]:
            place = self._returns_at + reader * _LINE // _WORD
            if words[place] < number:  # it counts up from 0 in 64 bits, which it does not leave
                self._await(lambda: words[place] >= number, reader)  # noqa: B023
        # (C) Pairs with the fence in `release`: what is written into the slot comes after the counts that freed it.
        fence()
        return slot

    def _await(self, ready: Callable[[], bool], late: int) -> None:
        def over() -> bool:
            return ready() or self.verdict.there()

        timeout_s, progress = self._node.timeout_s, self._node.progress
        patience_s = min(_PATIENCE_S, timeout_s)
        if not wait_until(over, patience_s, progress) and (
            self._in_vain() or not wait_until(over, timeout_s - patience_s, progress)
        ):
            raise LateRank(late)
        # A verdict does not take back what has come: the slowest rank still gets what it can get.
        if not ready():
            raise GivenUp
