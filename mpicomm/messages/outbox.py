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
MEMORY_DIVISOR = 32
"""The outbox takes at most the memory of the device divided by this number."""
_GRANULARITY = 64 << 10  # a message takes a multiple of this, so that small holes are few.
# The outbox grows to this number of slots of one length before it waits for receivers. The larger number is for slots
# that have at most these bytes together.
_LARGE_SLOTS, _SMALL_SLOTS = 16, 64
_SMALL_NBYTES = 128 << 20
_PATIENCE_S = 2e-4  # about the time to allocate memory, and to open it on the other rank


class OutboxFullError(Exception):
    """The error for an outbox without room for a message. The text gives the reason."""


@dataclass(eq=False)
class Block:
    """An allocation, and the packed handle with which peers open it."""

    segment: Segment
    packet: bytes
    free_ranges: list[tuple[int, int]]
    """The begin and the end of each free range, in order. No two ranges touch."""

    def allocate(self, nbytes: int) -> int | None:
        """Return the begin of a free range of ``nbytes`` bytes, which becomes the caller's; None if there is none."""
        for index, (begin, end) in enumerate(self.free_ranges):
            if end - begin >= nbytes:
                self.free_ranges[index : index + 1] = [(begin + nbytes, end)] if begin + nbytes < end else []
                return begin
        return None

    def free(self, begin: int, end: int) -> None:
        """Free a range, and merge it with the free ranges that it touches."""
        ranges = self.free_ranges
        index = bisect.bisect(ranges, (begin, end))
        if index < len(ranges) and ranges[index][0] == end:
            end = ranges.pop(index)[1]
        if index > 0 and ranges[index - 1][1] == begin:
            index -= 1
            begin = ranges.pop(index)[0]
        ranges.insert(index, (begin, end))


class Outbox:
    """Blocks of memory. Each message takes a *slot*, a range of a block.

    When a message is complete, its slot stays for the next message of about its length, because programs repeat
    lengths. The outbox frees all such *idle* slots if a message of another length has too little room. It grows only if
    the messages in flight leave no room, and waits for receivers only if it is full.

    All blocks together have at most ``most_nbytes``.
    """

    def __init__(self, device: GpuBackend, secret: bytes, most_nbytes: int | None = None) -> None:
        self._device = device
        self._secret = secret
        self._bound = most_nbytes
        self._lock = threading.Lock()  # several threads of the program may send
        limit = device.total_nbytes // MEMORY_DIVISOR
        if most_nbytes is not None:
            limit = min(limit, max(0, most_nbytes - BLOCK_NBYTES))  # a block holds the lines
        self._most_nbytes = limit // BLOCK_NBYTES * BLOCK_NBYTES
        self._words: Block | None = None
        self._blocks: list[Block] = []
        self._segments: dict[bytes, Segment] = {}
        self._in_flight = InFlight(device)
        self._idle: defaultdict[int, list[OutboxSlot]] = defaultdict(list)  # by capacity

    def reserve(self, nbytes: int) -> OutboxSlot:
        """Return a slot with a header for a message.

        Raises `OutboxFullError`, or `HandleError` if memory cannot be allocated.
        """
        capacity = -(-nbytes // _GRANULARITY) * _GRANULARITY
        with self._lock:
            idle = self._idle.get(capacity)
            slot = idle.pop() if idle else self._acquire_slot(capacity)
            if slot.nbytes != nbytes:
                slot.assign(nbytes)
            self._in_flight.add(slot)
            return slot

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packed handle, or None for a block of a peer."""
        return self._segments.get(packet)

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages."""
        with self._lock:
            self._mark_idle(self._in_flight.poll())
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

    def _acquire_slot(self, capacity: int) -> OutboxSlot:
        if capacity > self._most_nbytes:
            raise self._too_small_for(capacity)
        if self._words is None:
            words = self._allocate(2 * DONE)
            # This precedes any header that names the block, because a count other than 0 would let a receiver through.
            self._device.zero(words.segment.pointer, 2 * DONE)
            self._in_flight.set_up(words.segment.pointer)
            self._words = words  # last, because the steps above may raise
        self._mark_idle(self._in_flight.completed())
        slot = self._pop_idle(capacity) or self._create_slot(capacity) or self._reclaim_slot(capacity)
        free_lines = self._in_flight.free_lines
        if slot is None:
            few_nbytes = max(_LARGE_SLOTS * capacity, min(_SMALL_SLOTS * capacity, _SMALL_NBYTES))
            # A wait for so few slots would be a wait for most messages.
            grows = free_lines and self._in_flight.total_nbytes + capacity <= min(few_nbytes, self._most_nbytes)
            slot = None if grows else self._wait_for_slot(capacity)
        if slot is None and free_lines:
            self._grow(capacity)
            slot = self._create_slot(capacity)
        if slot is None:
            raise OutboxFullError(f"{MOST_IN_FLIGHT} messages are in flight")
        return slot

    def _pop_idle(self, capacity: int) -> OutboxSlot | None:
        idle = self._idle.get(capacity)
        return idle.pop() if idle else None

    def _create_slot(self, capacity: int) -> OutboxSlot | None:
        """Return a new slot, or None if memory or lines are missing."""
        for block in self._blocks if self._in_flight.free_lines else ():
            offset = block.allocate(capacity)
            if offset is not None:
                break
        else:
            return None
        assert self._words is not None
        line = self._in_flight.acquire_line()
        header = RendezvousHeader(0, self._words.packet, line * LINE_NBYTES, block.packet, offset, capacity)
        ready = self._words.segment.pointer + line * LINE_NBYTES
        # MPI.PACKED matches every type that the receiver names.
        message = [header.pack(self._secret), HEADER_NBYTES, MPI.PACKED]
        pointer = block.segment.pointer + offset
        return OutboxSlot(block, offset, capacity, pointer, line, ready, ready + DONE, message)

    def _reclaim_slot(self, capacity: int) -> OutboxSlot | None:
        """Poll for complete messages. Return a slot that they leave, or None.

        A poll takes less time than an allocation that the other rank opens. A message comes here only if all memory
        that counts as free is used up. So the polls of many messages together take little time.
        """
        self._mark_idle(self._in_flight.poll())
        slot = self._pop_idle(capacity)
        if not self._idle.get(capacity):
            # The next message would have to poll, too, because slots of other lengths have the memory.
            for idle in self._idle.values():
                for each in idle:
                    each.block.free(each.offset, each.offset + each.capacity)
                    self._in_flight.free_lines.append(each.line)
            self._idle.clear()
            slot = slot or self._create_slot(capacity)
        return slot

    def _mark_idle(self, slots: list[OutboxSlot]) -> None:
        for slot in slots:
            self._idle[slot.capacity].append(slot)

    def _grow(self, capacity: int) -> None:
        """Allocate a block with room for a slot. Double the outbox while it is small, so that blocks are few."""
        total = self._in_flight.total_nbytes
        wanted = max(capacity, min(total, LARGEST_BLOCK_NBYTES), FIRST_BLOCK_NBYTES)
        size = min(-(-wanted // BLOCK_NBYTES) * BLOCK_NBYTES, self._most_nbytes - total)
        if size < capacity:
            raise self._too_small_for(capacity)
        self._blocks.append(self._allocate(size))
        self._in_flight.total_nbytes += size

    def _too_small_for(self, capacity: int) -> OutboxFullError:
        hint = "" if self._bound is None else f"; MPICOMM_MEMORY leaves {self._bound} bytes for the outbox: raise it"
        return OutboxFullError(
            f"messages that are not received yet leave less than {capacity} of {self._most_nbytes} bytes{hint}"
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

    def _wait_for_slot(self, capacity: int) -> OutboxSlot | None:
        """Wait for a slot as long as the receivers copy messages. Return None if they copy none.

        This throttles a program that enqueues messages faster than its GPU copies them, because the program would fill
        all of the memory.
        """
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline:
            left = len(self._in_flight)
            slot = self._reclaim_slot(capacity)
            if slot is not None:
                return slot
            if len(self._in_flight) < left:
                deadline = time.monotonic() + _PATIENCE_S
        return None
