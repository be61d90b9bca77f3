"""Channels: messages of up to a slot's size from each rank of a node to each peer, through shared host memory.

Every rank has an arena that all ranks map. Its *slots* hold the data that this rank sends. The rank copies a chunk into
a slot once, for any number of readers. Its *inbox* has a ring of entries for every peer. An entry has the offset of a
message in the peer's slots, and its length. Its *credits* count the messages of this rank that each reader has read,
which frees the slots.

    sender                                        reader
    wait for a slot that all its readers have read
    copy the chunk into the slot              (A)
    entry.content = offset and length         (B)
    fence
    entry.flag = call and number                  poll entry.flag
                                                  fence
                                                  read entry.content                           (B)
                                                  read the chunk                               (A)
                                                  fence
    see the credit of the reader              (C) credit = number of messages read
    fence
    copy the next chunk into the slot

The fences around the flag publish the chunk (A) and the entry (B). Without them a reader could see the flag with older
bytes of the slot, or with an older offset. The fences around the credit give the slot back (C). Without them a reader
that still reads this chunk could see bytes of the sender's next chunk. Every word has one writer.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from mpicomm.cluster.agreement import Group
from mpicomm.devices.host import HostBackend, fence
from mpicomm.errors import CollectiveTimeoutError, MpicommError, PeerError
from mpicomm.sharing.segments import SharedMemory, share
from mpicomm.waiting import wait_until

_WORD = 8
_LINE = 128  # bytes; words with different writers are on different cache lines, and on different pairs of lines
_PAGE = 4096
_EPOCHS = 2**32 - 1
_PATIENCE_S = 0.5  # how long a wait goes on before it looks whether the calls of the ranks differ
_OFFSET_BITS = 32  # the bits of the content word for the message's offset in the slots; the others are its length
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
# A copy takes up to twice as long if source and target have different offsets in their cache lines. NumPy's large
# arrays begin 16 bytes past the start of a line. Offsets in steps of 16 keep every element type aligned.
_CACHE_LINE = 64
_ALIGNMENT = 16
_ERRORS: dict[str, type[MpicommError]] = {each.__name__: each for each in (CollectiveTimeoutError, PeerError)}
_SETTLE_S = 0.02  # some time slices of the scheduler, because ranks may outnumber cores


def _round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


class Aborted(Exception):
    """A call that this rank cannot finish: the ``reason``, and the index in the node of the rank at fault."""

    TIMED_OUT = "the rank did not send, or did not read, in time"
    CALL_MISMATCH = "a message belongs to another call than this rank's call"
    SIZE_MISMATCH = "the rank sent another number of bytes than this rank expects"
    PEER_FAILED = "some rank has published an error, so no more data will come"

    def __init__(self, reason: str, index: int = -1, sent: int = 0, expected: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.index, self.sent, self.expected = reason, index, sent, expected


class Channels(SharedMemory):
    """This rank's ends of the channels of a node. Construction is collective and raises as `share` does.

    Each reader reads the messages of a sender in the order of sending. Methods that block raise `Aborted`: when some
    rank has published an error, and after the node's ``timeout_s`` seconds without progress, or soon if the ranks'
    calls differ, because then no more data will come. Messages up to number ``first`` count as sent and read on every
    channel; all ranks pass the same number.
    """

    def __init__(self, node: Group, slot_nbytes: int, slots: int, first: int, calls_differ: Callable[[], bool]) -> None:
        self._rank = node.rank
        self._node = node
        self._calls_differ = calls_differ
        # On a channel every unread message holds a slot. There are at least as many entries as slots. So no sender
        # overwrites an entry before its reader has read it, and no sender has to wait for an entry.
        self._entries = 1 << (slots - 1).bit_length()
        inbox_nbytes = _round_up(self._entries * 2 * _WORD, _LINE)
        self._inbox_words = inbox_nbytes // _WORD
        self._credits_at = node.size * self._inbox_words
        agreed_error_at = node.size * (inbox_nbytes + _LINE)
        slots_at = _round_up(agreed_error_at + AgreedError.nbytes(node.size), _PAGE)
        self._stride = _round_up(slot_nbytes, _CACHE_LINE) + _CACHE_LINE
        nbytes = slots_at + slots * self._stride
        backend = HostBackend(node.timeout_s)
        segments = share(
            node, backend, "host arena", lambda: backend.allocate("memfd", nbytes), lambda: (slot_nbytes, slots, first)
        )
        super().__init__("host arena", "memfd", segments)
        views = [backend.view(segments[index], (nbytes,), np.dtype(np.uint8)) for index in range(node.size)]
        self._addresses = [view.ctypes.data + slots_at for view in views]
        self._words = [view[:slots_at].data.cast("Q") for view in views]
        self.agreed_error = AgreedError(node, views[0][agreed_error_at:slots_at].data)
        self._sent = [first] * node.size
        self._read = [first] * node.size
        # For each slot its readers, each with the number of the slot's message on the channel to that reader.
        self._readers: list[list[tuple[int, int]]] = [[] for _ in range(slots)]
        self._next_slot = 0
        self.hash32 = 0
        """The hash of the call that this rank is in; it travels with every message."""

    def send(self, pointer: int, nbytes: int, readers: Sequence[int]) -> None:
        """Send at most a slot's size of bytes to some ranks; blocks until a slot is free and holds the bytes."""
        slot = self._await_free_slot()
        offset = slot * self._stride + pointer % _CACHE_LINE // _ALIGNMENT * _ALIGNMENT
        ctypes.memmove(self._addresses[self._rank] + offset, pointer, nbytes)
        self._readers[slot] = self._publish(readers, offset, nbytes)

    def receive(self, source: int, nbytes: int) -> int:
        """Return the address of the next message from a rank; blocks. The message stays there until `release`.

        Raises `Aborted` also if the message belongs to another call, or does not have ``nbytes``.
        """
        self._read[source] = number = self._read[source] + 1
        words = self._words[self._rank]
        entry = self._entry(source, number)
        flag = self._flag(number)
        if words[entry] != flag:
            epoch = flag & _EPOCHS
            self._await(lambda: words[entry] & _EPOCHS == epoch, source)
            if words[entry] != flag:
                raise Aborted(Aborted.CALL_MISMATCH, source)
        # (A), (B) Pairs with the fence in `_publish`: this rank reads content and chunk after the flag.
        fence()
        content = words[entry + 1]
        if content >> _OFFSET_BITS != nbytes:
            raise Aborted(Aborted.SIZE_MISMATCH, source, content >> _OFFSET_BITS, nbytes)
        return self._addresses[source] + (content & _OFFSET_MASK)

    def release(self, sources: Iterable[int]) -> None:
        """Give back the slot of the last message from each of these ranks; local."""
        # (C) Pairs with the fence in `_await_free_slot`: this rank has read the chunk before it writes the credit. The
        # credit lets the sender overwrite the chunk.
        fence()
        for source in sources:
            self._words[source][self._credits_at + self._rank * _LINE // _WORD] = self._read[source]

    def close_peers(self) -> None:
        """Unmap the peers' arenas; local. This rank cannot send or receive afterwards."""
        self._words.clear()
        self._addresses.clear()
        self.agreed_error.close()
        super().close_peers()

    def _publish(self, readers: Sequence[int], offset: int, nbytes: int) -> list[tuple[int, int]]:
        """Publish a message in this rank's slots to its readers; return its number on each channel. Never blocks."""
        numbers = []
        for reader in readers:
            self._sent[reader] = number = self._sent[reader] + 1
            self._words[reader][self._entry(self._rank, number) + 1] = nbytes << _OFFSET_BITS | offset
            numbers.append((reader, number))
        # (A), (B) Pairs with the fence in `receive`: this rank writes chunk and content before the flag.
        fence()
        for reader, number in numbers:
            self._words[reader][self._entry(self._rank, number)] = self._flag(number)
        return numbers

    def _entry(self, source: int, number: int) -> int:
        return source * self._inbox_words + 2 * (number % self._entries)

    def _flag(self, number: int) -> int:
        # Never 0, because an unwritten entry holds 0. The epoch may wrap, because a reader compares it only with the
        # next epoch of the same entry.
        return self.hash32 << 32 | 1 + number % _EPOCHS

    def _await_free_slot(self) -> int:
        """Wait until all readers have read the slot that was used longest ago; return this slot."""
        slot = self._next_slot
        self._next_slot = (slot + 1) % len(self._readers)
        words = self._words[self._rank]
        for reader, number in self._readers[slot]:
            credit = self._credits_at + reader * _LINE // _WORD
            if words[credit] < number:  # numbers from 0 in 64 bits do not wrap
                self._await(lambda: words[credit] >= number, reader)  # noqa: B023
        # (C) Pairs with the fence in `release`: this rank reads the credits before it writes into the slot.
        fence()
        return slot

    def _await(self, ready: Callable[[], bool], peer: int) -> None:
        def over() -> bool:
            return ready() or self.agreed_error.is_set()

        timeout_s, progress = self._node.timeout_s, self._node.progress
        patience_s = min(_PATIENCE_S, timeout_s)
        if not wait_until(over, patience_s, progress) and (
            self._calls_differ() or not wait_until(over, timeout_s - patience_s, progress)
        ):
            raise Aborted(Aborted.TIMED_OUT, peer)
        # Also after an error a rank takes a message that has arrived, so that the slowest rank gets all such data.
        if not ready():
            raise Aborted(Aborted.PEER_FAILED)


class AgreedError:
    """The errors that ranks of a node have published in shared memory. All ranks raise the same one of them.

    ``memory`` is the same `nbytes` of zeroed shared memory on all ranks. It holds the length of each rank's error, 0
    for no error, and a slot for each rank's error.

    A rank publishes its error only if it sees no other error. A rank that sees any error waits `_SETTLE_S`, because
    ranks that fail at the same time publish their errors meanwhile. Then it decides for the error of the lowest rank
    that has published an error.

    Every rank decides once, for an error that some rank has published. All ranks decide for the same error, with one
    exception. A rank looks for other errors and publishes its own error microseconds later. If the scheduler preempts
    the rank in between for longer than `_SETTLE_S`, ranks that have decided keep their error, and later ranks may take
    the late error. Only a lock could exclude that, and a rank could die while it holds the lock.
    """

    def __init__(self, node: Group, memory: memoryview) -> None:
        self._rank = node.rank
        self._slot_nbytes = _slot_nbytes(node.size)
        slots_at = _WORD * node.size
        self._lengths = memory[:slots_at].cast("Q")
        self._slots = memory[slots_at:]
        self._decided: MpicommError | None = None

    @staticmethod
    def nbytes(size: int) -> int:
        """Return the bytes of memory that ``size`` ranks need."""
        return size * (_WORD + _slot_nbytes(size))

    def is_set(self) -> bool:
        """Return whether any rank has published an error. Local, fast enough for a polling loop."""
        return any(self._lengths)

    def read(self) -> MpicommError | None:
        """Return the error that this rank must raise; None if there is none. Local; waits `_SETTLE_S` once."""
        if self._decided is None and self.is_set():
            time.sleep(_SETTLE_S)
            rank, length = next((rank, length) for rank, length in enumerate(self._lengths) if length)
            # Pairs with the fence in `publish`: this rank reads the text after its length, which publishes the text.
            fence()
            start = rank * self._slot_nbytes
            message = bytes(self._slots[start : start + length]).decode(errors="ignore")  # it may end in a character
            name, ranks, text = message.split("\n", 2)
            self._decided = _ERRORS[name](text, ranks=[int(rank) for rank in ranks.split(",") if rank])
        return self._decided

    def publish(self, error: MpicommError) -> MpicommError:
        """Publish ``error`` if no rank has published an error, and return the error that this rank must raise; local.

        It waits `_SETTLE_S` once. An error longer than its slot loses its end.
        """
        name = type(error).__name__ if type(error).__name__ in _ERRORS else PeerError.__name__
        ranks = ",".join(map(str, error.ranks))
        message = f"{name}\n{ranks}\n{error}".encode(errors="replace")[: self._slot_nbytes]
        # As late as possible, because ranks may disagree if this check is long before the publication.
        if not self.is_set():
            start = self._rank * self._slot_nbytes
            self._slots[start : start + len(message)] = message
            # Pairs with the fence in `read`: a rank that sees the length also sees the text.
            fence()
            self._lengths[self._rank] = len(message)
        decided = self.read()
        assert decided is not None
        return decided

    def close(self) -> None:
        """Release the memory; local. Afterwards there is no error."""
        self._lengths = memoryview(bytes(_WORD)).cast("Q")
        self._slots = memoryview(b"")
        self._decided = None


def _slot_nbytes(size: int) -> int:
    """Return the bytes of one error between ``size`` ranks: a text, and a line of the call log for each rank."""
    return 2048 + 512 * size
