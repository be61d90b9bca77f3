"""The outbox: memory of this rank's device that holds messages until their receivers have copied them."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from mpi4py import MPI

from mpicomm.devices.cuda.types import GpuBackend, Segment
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import HandleError
from mpicomm.messages.in_flight import DONE, LINE_NBYTES, MOST_IN_FLIGHT, InFlight, OutboxSlot
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, RendezvousHeader

FIRST_BLOCK_NBYTES = 32 << 20
LARGEST_BLOCK_NBYTES = 256 << 20
"""The largest block for messages that are shorter. A peer opens a block in 0.2 to 2 ms, but from 512 MiB on in 20 ms
(H200, driver 580, 2026-11)."""
BLOCK_NBYTES = 2 << 20
"""Blocks are multiples of this size: whole allocations of the driver, so that a peer maps no other memory with one."""
PART = 32
"""The outbox takes at most the device's memory divided by this number."""
_GRAIN_NBYTES = 64 << 10  # a message takes a multiple of this, so that small holes are few.
# The outbox grows to this number of slots of one length before it waits for receivers. The larger number is for slots
# that have at most these bytes together.
_LARGE_PLACES, _SMALL_PLACES = 16, 64
_SMALL_NBYTES = 128 << 20
_PATIENCE_S = 2e-4  # about the time to allocate memory, and to open it on the other rank


class OutboxFullError(Exception):
    """The error for an outbox without room for a message. The text gives the reason."""


@dataclass(eq=False)
class Block:
    """An allocation, and the packed handle with which peers open it."""

    segment: Segment
    packet: bytes
    free: list[tuple[int, int]]
    """The begin and the end of each free range, in order. No two ranges touch."""

    def take(self, room: int) -> int | None:
        """Return the begin of a free range of ``room`` bytes, which becomes the caller's; None if there is none."""
        for index, (begin, end) in enumerate(self.free):
            if end - begin >= room:
                self.free[index : index + 1] = [(begin + room, end)] if begin + room < end else []
                return begin
        return None

    def give_back(self, begin: int, end: int) -> None:
        """Free a range."""
        index = bisect.bisect(self.free, (begin, end))
        if index < len(self.free) and self.free[index][0] == end:
            end = self.free.pop(index)[1]
        if index > 0 and self.free[index - 1][1] == begin:
            begin = self.free.pop(index - 1)[0]
            index -= 1
        self.free.insert(index, (begin, end))


class Outbox:
    """Blocks of memory. Each message takes a *slot*, a range of a block.

    When a message is over, its slot stays for the next message of about its length, because programs repeat lengths.
    The outbox gives up all such *idle* slots if another length has too little room for them. It grows only if the
    messages in flight leave no room, and waits for receivers only if it is full.

    All blocks together have at most ``most_nbytes``.
    """

    def __init__(self, device: GpuBackend, secret: bytes, most_nbytes: int | None = None) -> None:
        self._device = device
        self._secret = secret
        self._bound = most_nbytes
        self._lock = threading.Lock()  # several threads of the program may send
        most = device.total_nbytes // PART
        if most_nbytes is not None:
            most = min(most, max(0, most_nbytes - BLOCK_NBYTES))  # a block holds the lines
        self._most_nbytes = most // BLOCK_NBYTES * BLOCK_NBYTES
        self._words: Block | None = None
        self._blocks: list[Block] = []
        self._segments: dict[bytes, Segment] = {}
        self._in_flight = InFlight(device)
        self._idle: defaultdict[int, list[OutboxSlot]] = defaultdict(list)  # by the bytes of their last message

    def reserve(self, nbytes: int) -> OutboxSlot:
        """Return a slot with a header for a message.

        Raises `OutboxFullError`, or `HandleError` if memory cannot be allocated.
        """
        room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
        with self._lock:
            idle = self._idle.get(room)
            place = idle.pop() if idle else self._find_place(room)
            if place.nbytes != nbytes:
                place.set_message(nbytes)
            self._in_flight.add(place)
            return place

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packed handle, or None for a block of a peer."""
        return self._segments.get(packet)

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages."""
        with self._lock:
            self._make_idle(self._in_flight.look())
            return not self._in_flight

    def memory_use(self) -> MemoryUse:
        """Return the memory of all blocks."""
        with self._lock:
            return MemoryUse("outbox", device_nbytes=sum(segment.nbytes for segment in self._segments.values()))

    def close(self) -> None:
        """Free all blocks, after every peer has closed them. A second call does nothing."""
        with self._lock:
            with contextlib.suppress(HandleError):  # a device that has failed copies no more
                self._in_flight.close()
            while self._segments:
                self._segments.popitem()[1].close()
            self._words = None
            self._blocks.clear()
            self._idle.clear()

    def _find_place(self, room: int) -> OutboxSlot:
        if room > self._most_nbytes:
            raise self._too_small_for(room)
        if self._words is None:
            self._words = self._allocate(2 * DONE)
            # This precedes any header that names the block, because a count other than 0 would let a receiver through.
            self._device.zero(self._words.segment.pointer, 2 * DONE)
            self._in_flight.set_up(self._words.segment.pointer)
        self._make_idle(self._in_flight.over())
        place = self._take_idle(room) or self._new_place(room) or self._look_for_place(room)
        if place is None:
            few_nbytes = max(_LARGE_PLACES * room, min(_SMALL_PLACES * room, _SMALL_NBYTES))
            # A wait for so few slots would be a wait for most messages.
            grows = self._in_flight.lines and self._in_flight.total_nbytes + room <= min(few_nbytes, self._most_nbytes)
            place = None if grows else self._await_place(room)
        if place is None and self._in_flight.lines:
            self._grow(room)
            place = self._new_place(room)
        if place is None:
            raise OutboxFullError(f"{MOST_IN_FLIGHT} messages are in flight")
        return place

    def _take_idle(self, room: int) -> OutboxSlot | None:
        idle = self._idle.get(room)
        return idle.pop() if idle else None

    def _new_place(self, room: int) -> OutboxSlot | None:
        """Return a new slot, or None if memory or lines are missing."""
        for block in self._blocks if self._in_flight.lines else ():
            offset = block.take(room)
            if offset is not None:
                break
        else:
            return None
        assert self._words is not None
        line = self._in_flight.take_line()
        header = RendezvousHeader(0, self._words.packet, line * LINE_NBYTES, block.packet, offset, room)
        ready = self._words.segment.pointer + line * LINE_NBYTES
        # MPI.PACKED matches every type that the receiver names.
        message = [header.pack(self._secret), HEADER_NBYTES, MPI.PACKED]
        pointer = block.segment.pointer + offset
        return OutboxSlot(block, offset, room, pointer, line, ready, ready + DONE, message)

    def _look_for_place(self, room: int) -> OutboxSlot | None:
        """Look which messages are over. Return a slot that this leaves, or None.

        A look takes less time than an allocation that the other rank opens. A message comes here only if all memory
        that counts as free is used up. So the looks of many messages together take little time.
        """
        self._make_idle(self._in_flight.look())
        place = self._take_idle(room)
        if not self._idle.get(room):
            # The next message would have to look, too, because slots of other lengths have the memory.
            for places in self._idle.values():
                for each in places:
                    each.block.give_back(each.offset, each.offset + each.room)
                    self._in_flight.lines.append(each.line)
            self._idle.clear()
            place = place or self._new_place(room)
        return place

    def _make_idle(self, over: list[OutboxSlot]) -> None:
        for place in over:
            self._idle[place.room].append(place)

    def _grow(self, room: int) -> None:
        """Allocate a block with room for a message. Double the outbox while it is small, so that blocks are few."""
        total = self._in_flight.total_nbytes
        wanted = max(room, min(total, LARGEST_BLOCK_NBYTES), FIRST_BLOCK_NBYTES)
        size = min(-(-wanted // BLOCK_NBYTES) * BLOCK_NBYTES, self._most_nbytes - total)
        if size < room:
            raise self._too_small_for(room)
        self._blocks.append(self._allocate(size))
        self._in_flight.total_nbytes += size

    def _too_small_for(self, room: int) -> OutboxFullError:
        bound = "" if self._bound is None else f"; MPICOMM_MEMORY leaves {self._bound} bytes for the outbox: raise it"
        return OutboxFullError(
            f"messages that are not received yet leave less than {room} of {self._most_nbytes} bytes{bound}"
        )

    def _allocate(self, nbytes: int) -> Block:
        segment = self._device.allocate("ipc", nbytes)
        try:
            ((handle, _),) = self._device.export(segment)
        except HandleError:
            segment.close()
            raise
        block = Block(segment, handle.pack(), [(0, nbytes)])
        self._segments[block.packet] = segment
        return block

    def _await_place(self, room: int) -> OutboxSlot | None:
        """Wait for a slot as long as the receivers take messages. Return None if they take none.

        This holds up a program that enqueues messages faster than its GPU copies them, because the program would fill
        all of the memory.
        """
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            left = len(self._in_flight)
            place = self._look_for_place(room)
            if place is not None:
                return place
            if len(self._in_flight) < left:
                until = time.monotonic() + _PATIENCE_S
        return None
