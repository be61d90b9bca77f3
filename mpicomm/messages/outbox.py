"""The outbox: memory of this rank's device that holds messages until their receivers have copied them."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from mpi4py import MPI

from mpicomm.devices.base import Segment
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.devices.handle import MemoryUse
from mpicomm.errors import HandleError
from mpicomm.messages.in_flight import DONE, LINE_NBYTES, MOST_IN_FLIGHT, InFlight, OutboxSlot
from mpicomm.messages.rendezvous_header import HEADER_NBYTES, MOST_EXTENTS, Extent, RendezvousHeader, is_for_kernels

FIRST_BLOCK_NBYTES = 32 << 20
BLOCK_NBYTES = 2 << 20
"""Blocks are multiples of this size: whole allocations of the driver, so that a peer maps no other memory with one."""
PART = 64
"""The outbox takes at most the device's memory divided by this number."""
_GRAIN_NBYTES = 64 << 10  # a message takes a multiple of this, so that small holes are few.
# The outbox grows to this number of slots of one length before it waits for receivers. The larger number is for slots
# that have at most these bytes together.
_LARGE_PLACES, _SMALL_PLACES = 16, 64
_SMALL_NBYTES = 128 << 20
_PATIENCE_S = 2e-4  # about the time to allocate memory, and to open it on the other rank


class OutboxFullError(Exception):
    """The error for an outbox without room for a message. The text gives the reason."""


@dataclass
class Block:
    """An allocation: its segment, the packed handle with which peers open it, and its range in the outbox."""

    segment: Segment
    packet: bytes
    begin: int
    end: int


class Outbox:
    """A range of bytes, which grows by blocks. Each message takes a *slot*, which may lie in several blocks.

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
        self._free: list[tuple[int, int]] = []  # sorted ranges; no two ranges touch
        self._in_flight = InFlight(device)
        self._idle: defaultdict[int, list[OutboxSlot]] = defaultdict(list)  # by the bytes of their last message

    def reserve(self, nbytes: int, *, whole: bool = False) -> OutboxSlot:
        """Return a slot with a header for a message. With ``whole``, or for kernels, the slot lies in one block.

        Raises `OutboxFullError`, or `HandleError` if memory cannot be allocated.
        """
        room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
        with self._lock:
            idle = self._idle.get(room)
            place = idle.pop() if idle else self._find_place(room, whole=whole or is_for_kernels(nbytes))
            if place.nbytes != nbytes:
                place.set_message(nbytes)
            self._in_flight.add(place)
            return place

    def put_back(self, place: OutboxSlot) -> None:
        """Make a slot idle if this rank does not send its message and has enqueued nothing for it."""
        with self._lock:
            self._in_flight.remove(place)
            self._idle[place.end - place.begin].append(place)

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
            self._free.clear()
            self._idle.clear()

    def _find_place(self, room: int, *, whole: bool) -> OutboxSlot:
        if room > self._most_nbytes:
            raise self._too_small_for(room)
        if self._words is None:
            self._words = self._allocate(2 * DONE, 0)
            # This precedes any header that names the block, because a count other than 0 would let a receiver through.
            self._device.zero(self._words.segment.pointer, 2 * DONE)
            self._in_flight.set_up(self._words.segment.pointer)
        self._make_idle(self._in_flight.over())
        place = self._take_idle(room) or self._new_place(room, whole=whole) or self._look_for_place(room, whole=whole)
        if place is None:
            few_nbytes = max(_LARGE_PLACES * room, min(_SMALL_PLACES * room, _SMALL_NBYTES))
            # A wait for so few slots would be a wait for most messages.
            grows = self._in_flight.has_lines and self._total_nbytes + room <= min(few_nbytes, self._most_nbytes)
            place = None if grows else self._await_place(room, whole=whole)
        if place is None and self._in_flight.has_lines:
            self._grow(room, whole=whole)
            place = self._new_place(room, whole=whole)
        if place is None:
            raise OutboxFullError(f"{MOST_IN_FLIGHT} messages are in flight")
        return place

    def _take_idle(self, room: int) -> OutboxSlot | None:
        idle = self._idle.get(room)
        return idle.pop() if idle else None

    def _new_place(self, room: int, *, whole: bool) -> OutboxSlot | None:
        """Return a new slot, or None if memory or lines are missing."""
        begin = self._take(room, whole=whole) if self._in_flight.has_lines else None
        if begin is None:
            return None
        parts = [(block, max(begin, block.begin), min(begin + room, block.end)) for block in self._blocks]
        extents = tuple(
            Extent(block.packet, start - block.begin, stop - start) for block, start, stop in parts if start < stop
        )
        if len(extents) > MOST_EXTENTS:
            self._release(begin, begin + room)
            raise OutboxFullError(f"free memory lies in more than {MOST_EXTENTS} blocks")
        assert self._words is not None
        line, last = self._in_flight.take_line()
        header = RendezvousHeader(0, self._words.packet, line * LINE_NBYTES, extents).pack(self._secret)
        places = [(self._segments[each.packet].pointer + each.offset, each.nbytes) for each in extents]
        ready = self._words.segment.pointer + line * LINE_NBYTES
        # MPI.PACKED matches every type that the receiver names.
        message = [header, HEADER_NBYTES, MPI.PACKED]
        return OutboxSlot(begin, begin + room, places, line, ready, ready + DONE, last, message)

    def _look_for_place(self, room: int, *, whole: bool) -> OutboxSlot | None:
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
                    self._give_up(each)
            self._idle.clear()
            place = place or self._new_place(room, whole=whole)
        return place

    def _make_idle(self, over: list[OutboxSlot]) -> None:
        for place in over:
            if len(place.places) == 1:
                self._idle[place.end - place.begin].append(place)
            else:
                self._give_up(place)

    def _take(self, room: int, *, whole: bool) -> int | None:
        for index, (begin, end) in enumerate(self._free):
            start: int | None = begin
            if whole:  # in one block
                parts_of_blocks = ((max(begin, block.begin), min(end, block.end)) for block in self._blocks)
                start = next((first for first, stop in parts_of_blocks if stop - first >= room), None)
            if start is not None and end - start >= room:
                parts = (begin, start), (start + room, end)
                self._free[index : index + 1] = [part for part in parts if part[0] < part[1]]
                return start
        return None

    def _release(self, begin: int, end: int) -> None:
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))

    def _grow(self, room: int, *, whole: bool) -> None:
        """Allocate the bytes that are missing after the last block.

        At least double the outbox, so that blocks are few.
        """
        total = self._total_nbytes
        touches = not whole and self._free and self._free[-1][1] == total
        tail = total - self._free[-1][0] if touches else 0
        wanted = max(room - tail, total, FIRST_BLOCK_NBYTES)
        size = min(-(-wanted // BLOCK_NBYTES) * BLOCK_NBYTES, self._most_nbytes - total)
        if size < room - tail:
            raise self._too_small_for(room)
        self._blocks.append(self._allocate(size, total))
        self._in_flight.outbox_nbytes = self._total_nbytes
        self._release(total, self._blocks[-1].end)

    def _too_small_for(self, room: int) -> OutboxFullError:
        bound = "" if self._bound is None else f"; MPICOMM_MEMORY leaves {self._bound} bytes for the outbox: raise it"
        return OutboxFullError(
            f"messages that are not received yet leave less than {room} of {self._most_nbytes} bytes{bound}"
        )

    def _allocate(self, nbytes: int, begin: int) -> Block:
        segment = self._device.allocate("ipc", nbytes)
        try:
            ((handle, _),) = self._device.export(segment)
        except HandleError:
            segment.close()
            raise
        block = Block(segment, handle.pack(), begin, begin + nbytes)
        self._segments[block.packet] = segment
        return block

    def _await_place(self, room: int, *, whole: bool) -> OutboxSlot | None:
        """Wait for a slot as long as the receivers take messages. Return None if they take none.

        This holds up a program that enqueues messages faster than its GPU copies them, because the program would fill
        all of the memory.
        """
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            left = len(self._in_flight)
            place = self._look_for_place(room, whole=whole)
            if place is not None:
                return place
            if len(self._in_flight) < left:
                until = time.monotonic() + _PATIENCE_S
        return None

    @property
    def _total_nbytes(self) -> int:
        return self._blocks[-1].end if self._blocks else 0

    def _give_up(self, place: OutboxSlot) -> None:
        self._release(place.begin, place.end)
        self._in_flight.give_up_line(place)
