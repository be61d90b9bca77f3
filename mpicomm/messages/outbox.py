"""The outbox: memory of this rank's device in which long messages lie until their receivers have copied them."""

from __future__ import annotations

import bisect
import threading
from dataclasses import dataclass

import numpy as np

from mpicomm.devices.base import Segment
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import HandleError
from mpicomm.messages.description import MOST_EXTENTS, Description, Extent
from mpicomm.messages.device import MessageDevice, SideStream

FIRST_BLOCK_NBYTES = 32 << 20
BLOCK_NBYTES = 2 << 20
"""Blocks are multiples of this: whole allocations of the driver, so that a peer that opens one sees nothing else."""
MOST_IN_FLIGHT = 1024
PART = 64
"""The outbox takes no more than this part of the device's memory."""
_GRAIN_NBYTES = 64 << 10  # a message takes a multiple of this, so that few small holes are left
_LINE_NBYTES = 16
DONE = 8
"""The offset of `done` in the line of a message; `ready` comes first."""


class OutboxFullError(Exception):
    """The outbox has no room for a message; the text says why."""


@dataclass
class Block:
    """An allocation: its segment, the packed handle with which peers open it, and its range in the outbox."""

    segment: Segment
    packet: bytes
    begin: int
    end: int


@dataclass(frozen=True)
class _InFlight:
    """A message that its receiver has not copied yet: its range, its line, and the value `done` will have."""

    begin: int
    end: int
    line: int
    last: int


class Outbox:
    """A range of bytes of which each message takes a part. It grows by blocks; a message may lie in several of them.

    Each message has a line, the two counts `ready` and `done`, in a block that holds all lines. Only the sender's
    stream stores `ready`, and only the receiver's stream stores `done`. Both only grow: the next message with the same
    line counts on from where the last one stopped. So nothing has to clear a line, which would need an order with the
    stores of peers.

    All blocks together have at most ``most_nbytes``.
    """

    def __init__(self, device: MessageDevice, most_nbytes: int | None = None) -> None:
        self._device = device
        self._bound = most_nbytes
        self._lock = threading.Lock()  # several threads of the program may send
        most = device.total_nbytes // PART
        if most_nbytes is not None:
            most = min(most, max(0, most_nbytes - BLOCK_NBYTES))  # a block holds the lines
        self._most_nbytes = most // BLOCK_NBYTES * BLOCK_NBYTES
        self._words: Block | None = None
        self._blocks: list[Block] = []
        self._free: list[tuple[int, int]] = []  # sorted ranges, of which no two touch
        self._lines = list(range(MOST_IN_FLIGHT))
        self._counts = [0] * MOST_IN_FLIGHT
        self._in_flight: list[_InFlight] = []
        self._number = 0

    def reserve(self, nbytes: int) -> Description:
        """Give a message its place. Raises `OutboxFullError`, or `HandleError` where memory cannot be allocated."""
        with self._lock:
            room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
            if room > self._most_nbytes:
                raise self._too_small_for(room)
            if self._words is None:
                self._words = self._allocate(MOST_IN_FLIGHT * _LINE_NBYTES, 0)
                # Before any description names the block: a count that is not 0 would let a receiver through.
                self._device.zero(self._words.segment.pointer, MOST_IN_FLIGHT * _LINE_NBYTES)
            begin = self._take(room)
            if begin is None or not self._lines:
                self._reclaim()
                begin = self._take(room) if begin is None else begin
            if begin is None:
                begin = self._grow(room)
            if not self._lines:
                self._release(begin, begin + room)
                raise OutboxFullError(f"{MOST_IN_FLIGHT} messages are in flight")
            extents = self._extents(begin, nbytes)
            if len(extents) > MOST_EXTENTS:
                self._release(begin, begin + room)
                raise OutboxFullError(f"free memory lies in more than {MOST_EXTENTS} blocks")
            line = self._lines.pop()
            self._number += 1
            words = self._words.packet
            described = Description(nbytes, self._number, words, line * _LINE_NBYTES, self._counts[line], extents)
            self._counts[line] = described.last
            self._in_flight.append(_InFlight(begin, begin + room, line, described.last))
            return described

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packed handle, None for a block of a peer."""
        for block in (self._words, *self._blocks):
            if block is not None and block.packet == packet:
                return block.segment
        return None

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages."""
        with self._lock:
            self._reclaim()
            return not self._in_flight

    def memory_use(self) -> MemoryUse:
        """Return the memory of all blocks."""
        with self._lock:
            blocks = [block for block in (self._words, *self._blocks) if block is not None]
            return MemoryUse("outbox", device_nbytes=sum(block.segment.nbytes for block in blocks))

    def close(self) -> None:
        """Free all blocks; every peer must have closed them. A second call does nothing."""
        with self._lock:
            for block in (self._words, *self._blocks):
                if block is not None:
                    block.segment.close()
            self._words = None
            self._blocks.clear()
            self._free.clear()
            self._in_flight.clear()

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
        """Allocate the bytes that are missing behind the last block; at least double the outbox: so blocks are few."""
        total = self._blocks[-1].end if self._blocks else 0
        tail = total - self._free[-1][0] if self._free and self._free[-1][1] == total else 0
        wanted = max(room - tail, total, FIRST_BLOCK_NBYTES)
        size = min(-(-wanted // BLOCK_NBYTES) * BLOCK_NBYTES, self._most_nbytes - total)
        if size < room - tail:
            raise self._too_small_for(room)
        self._blocks.append(self._allocate(size, total))
        self._release(total, self._blocks[-1].end)
        begin = self._take(room)
        assert begin is not None
        return begin

    def _too_small_for(self, room: int) -> OutboxFullError:
        bound = "" if self._bound is None else f"; MPICOMM_MEMORY leaves {self._bound} bytes for the outbox: raise it"
        return OutboxFullError(
            f"messages that are not received yet leave less than {room} of {self._most_nbytes} bytes{bound}"
        )

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
        """Release the memory of messages that are copied. It blocks to read the counts, but for no work of the user."""
        if self._words is None or not self._in_flight:
            return
        device = self._device
        words = device.pinned(MOST_IN_FLIGHT * _LINE_NBYTES)
        with SideStream(device.side_streams) as stream:
            # Pairs with the receivers' stores of `done` in mpicomm_publish: they come after the copies out of the
            # outbox. So work that is enqueued from here on may overwrite a message whose `done` is seen here. A message
            # whose `done` is not there yet keeps its memory.
            device.copy(words.ctypes.data, self._words.segment.pointer, words.nbytes, stream)
            device.synchronize(stream)
        done = words.view(np.uint64)[DONE // 8 :: _LINE_NBYTES // 8]
        left = []
        for message in self._in_flight:
            if int(done[message.line]) == message.last:
                self._release(message.begin, message.end)
                self._lines.append(message.line)
            else:
                left.append(message)
        self._in_flight = left
