"""Outbox: memory of this rank's device in which messages lie until their receivers have copied them."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass

import numpy as np

from mpicomm.devices.base import Segment
from mpicomm.errors import HandleError
from mpicomm.messages.description import MOST_EXTENTS, Description, Extent
from mpicomm.messages.device import MessageDevice

_FIRST_BLOCK_NBYTES = 32 << 20
_BLOCK_NBYTES = 2 << 20  # blocks are whole allocations of the driver, which share nothing with others
_PART = 64  # no more than this part of a device's memory
_GRAIN_NBYTES = 64 << 10  # of what a message takes, so that few small holes are left
_LINES = 1024  # messages under way at once
_LINE_NBYTES = 16
DONE = 8  # where `done` is in a line; `ready` is in front


class OutboxFullError(Exception):
    """There is no room for a message; the text says why."""


@dataclass
class Block:
    """An allocation: its segment, the packet by which peers open it, and where it begins in the outbox."""

    segment: Segment
    packet: bytes
    begin: int
    end: int


@dataclass(frozen=True)
class _Sent:
    begin: int
    end: int
    line: int
    last: int


class Outbox:
    """A line of bytes that messages take parts of; it grows by blocks, and the part of one message may lie in several.

    Every message has two words in a block of their own. Only the sender's stream stores the first, `ready`, and only
    the receiver's the second, `done`. Both only grow, and go on from where the message before has left them: so words
    need not be cleared, which would have to be ordered with what peers store.
    """

    def __init__(self, device: MessageDevice) -> None:
        self._device = device
        self._lock = threading.Lock()  # of the thread that sends, and of those in which others do
        self._most_nbytes = device.total_nbytes // _PART // _BLOCK_NBYTES * _BLOCK_NBYTES
        self._words: Block | None = None
        self._blocks: list[Block] = []
        self._free: list[tuple[int, int]] = []  # sorted, none touches the next
        self._lines = list(range(_LINES))
        self._counts = [0] * _LINES
        self._sent: list[_Sent] = []
        self._number = 0

    def reserve(self, nbytes: int) -> Description:
        """Give a message its place. Raises `OutboxFullError` where there is none, `HandleError` as allocation does."""
        with self._lock:
            if self._words is None:
                self._words = self._allocate(_LINES * _LINE_NBYTES, 0)
                # Before anybody is told of it: a count that is not 0 would let a receiver through.
                self._device.zero(self._words.segment.pointer, _LINES * _LINE_NBYTES)
            room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
            begin = self._take(room)
            if begin is None or not self._lines:
                self._reclaim()
                begin = self._take(room) if begin is None else begin
            if begin is None:
                begin = self._grow(room)
            if not self._lines:
                self._release(begin, begin + room)
                raise OutboxFullError(f"{_LINES} messages are under way")
            extents = self._extents(begin, nbytes)
            if len(extents) > MOST_EXTENTS:
                self._release(begin, begin + room)
                raise OutboxFullError(f"free memory lies in more than {MOST_EXTENTS} blocks")
            line = self._lines.pop()
            self._number += 1
            words = self._words.packet
            described = Description(nbytes, self._number, words, line * _LINE_NBYTES, self._counts[line], extents)
            self._counts[line] = described.last
            self._sent.append(_Sent(begin, begin + room, line, described.last))
            return described

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packet, None if it is a peer's."""
        for block in (self._words, *self._blocks):
            if block is not None and block.packet == packet:
                return block.segment
        return None

    def is_taken(self) -> bool:
        """Return whether there is no message left that its receiver has not copied."""
        with self._lock:
            self._reclaim()
            return not self._sent

    def close(self) -> None:
        """Free all blocks; every peer must have closed them. A second call does nothing."""
        with self._lock:
            for block in (self._words, *self._blocks):
                if block is not None:
                    block.segment.close()
            self._words = None
            self._blocks.clear()
            self._free.clear()
            self._sent.clear()

    def _take(self, room: int) -> int | None:
        for index, (begin, end) in enumerate(self._free):
            if end - begin >= room:
                self._free[index : index + 1] = [(begin + room, end)] if end - begin > room else []
                return begin
        return None

    def _release(self, begin: int, end: int) -> None:
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))

    def _grow(self, room: int) -> int:
        """Allocate what is missing at the end, and as much as there is at least: so there are few blocks."""
        total = self._blocks[-1].end if self._blocks else 0
        tail = total - self._free[-1][0] if self._free and self._free[-1][1] == total else 0
        wanted = max(room - tail, total, _FIRST_BLOCK_NBYTES)
        size = min(-(-wanted // _BLOCK_NBYTES) * _BLOCK_NBYTES, self._most_nbytes - total)
        if size < room - tail:
            raise OutboxFullError(
                f"messages that are not received yet leave less than {room} of {self._most_nbytes} bytes"
            )
        self._blocks.append(self._allocate(size, total))
        self._release(total, self._blocks[-1].end)
        begin = self._take(room)
        assert begin is not None
        return begin

    def _allocate(self, nbytes: int, begin: int) -> Block:
        segment = self._device.allocate("ipc", nbytes)
        try:
            handle, _ = self._device.export(segment)
        except HandleError:
            segment.close()
            raise
        return Block(segment, handle.pack(), begin, begin + nbytes)

    def _extents(self, begin: int, nbytes: int) -> tuple[Extent, ...]:
        end = begin + nbytes
        parts = ((block, max(begin, block.begin), min(end, block.end)) for block in self._blocks)
        return tuple(
            Extent(block.packet, start - block.begin, stop - start) for block, start, stop in parts if start < stop
        )

    def _reclaim(self) -> None:
        """Free what receivers are done with: look at the words on the device, blocking but for no user's work."""
        if self._words is None or not self._sent:
            return
        device = self._device
        words = device.pinned(_LINES * _LINE_NBYTES)
        stream = device.side_streams.take()
        try:
            # Pairs with the stores of `done` by receivers, in mpicomm_publish: who sees one may write where the message
            # was, with work that is enqueued from here on. A message whose `done` is not there yet keeps its place.
            device.copy(words.ctypes.data, self._words.segment.pointer, words.nbytes, stream)
            device.synchronize(stream)
        finally:
            device.side_streams.give_back(stream)
        done = words.view(np.uint64)[DONE // 8 :: _LINE_NBYTES // 8]
        left = []
        for sent in self._sent:
            if int(done[sent.line]) == sent.last:
                self._release(sent.begin, sent.end)
                self._lines.append(sent.line)
            else:
                left.append(sent)
        self._sent = left
