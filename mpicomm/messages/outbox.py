"""The outbox: memory of this rank's device in which messages lie until their receivers have copied them."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from mpi4py import MPI

from mpicomm.devices.base import Segment
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import HandleError
from mpicomm.messages.description import (
    DESCRIPTION_NBYTES,
    MOST_EXTENTS,
    Description,
    Extent,
    is_for_kernels,
)
from mpicomm.messages.device import MessageDevice
from mpicomm.messages.in_flight import DONE, LINE_NBYTES, MOST_IN_FLIGHT, InFlight, Place

FIRST_BLOCK_NBYTES = 32 << 20
BLOCK_NBYTES = 2 << 20
"""Blocks are multiples of this: whole allocations of the driver, so that a peer that opens one sees nothing else."""
PART = 64
"""The outbox takes no more than this part of the device's memory."""
_GRAIN_NBYTES = 64 << 10  # a message takes a multiple of this, so that few small holes are left
# The outbox grows to this number of places of one length before it waits for receivers. The larger number is for places
# that have at most these bytes together.
_LARGE_PLACES, _SMALL_PLACES = 16, 64
_SMALL_NBYTES = 128 << 20
_PATIENCE_S = 2e-4  # about as long as it takes to allocate memory, and to open it on the other rank


class OutboxFullError(Exception):
    """The outbox has no room for a message; the text says why."""


@dataclass
class Block:
    """An allocation: its segment, the packed handle with which peers open it, and its range in the outbox."""

    segment: Segment
    packet: bytes
    begin: int
    end: int


class Outbox:
    """A range of bytes of which each message takes a part. It grows by blocks; a message may lie in several of them.

    A place whose message is over stays as it is for the next message of its length, because programs repeat lengths.
    All such *idle* places are given up where another message has no room. The outbox waits for receivers only where it
    is full.

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
        self._segments: dict[bytes, Segment] = {}
        self._free: list[tuple[int, int]] = []  # sorted ranges, of which no two touch
        self._in_flight = InFlight(device)
        self._idle: defaultdict[int, list[Place]] = defaultdict(list)  # by the bytes of their last message

    def reserve(self, nbytes: int, *, whole: bool = False) -> Description:
        """Give a message its place: in one block if it is for kernels, or ``whole``.

        Raises `OutboxFullError`, or `HandleError` where memory cannot be allocated.
        """
        with self._lock:
            if _room(nbytes) > self._most_nbytes:
                raise self._too_small_for(_room(nbytes))
            if self._words is None:
                self._set_up_words()
            place = self._idle_place(nbytes) or self._new_place(nbytes, whole=whole or is_for_kernels(nbytes))
            described = self._described(place, nbytes)
            place.nbytes, place.blocks, place.message = nbytes, described.blocks, []
            self._in_flight.add(place, described.counts)
            return described

    def take_idle(self, nbytes: int, secret: bytes) -> Place | None:
        """Give a message that kernels copy an idle place with its packed description; return None if none is idle.

        It takes a fifth of the time of `reserve`.
        """
        with self._lock:
            idle = self._idle.get(nbytes)
            place = idle.pop() if idle else self._idle_place(nbytes)
            if place is None:
                return None
            if place.nbytes != nbytes or not place.message:
                self._prepare(place, nbytes, secret)
            self._in_flight.add(place, 1)
            return place

    def put_back(self, place: Place) -> None:
        """Make the place of a message idle that this rank does not send, and for which nothing is enqueued."""
        with self._lock:
            self._in_flight.remove(place)
            self._idle[place.nbytes].append(place)

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packed handle, None for a block of a peer."""
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
        """Free all blocks; every peer must have closed them. A second call does nothing."""
        with self._lock:
            with contextlib.suppress(HandleError):  # a device that has failed copies no more
                self._in_flight.close()
            while self._segments:
                self._segments.popitem()[1].close()
            self._words = None
            self._blocks.clear()
            self._free.clear()
            self._idle.clear()

    def _described(self, place: Place, nbytes: int) -> Description:
        assert self._words is not None
        line, extents = place.line * LINE_NBYTES, _cut(place.extents, nbytes)
        return Description(nbytes, self._words.packet, line, extents)

    def _prepare(self, place: Place, nbytes: int, secret: bytes) -> None:
        described = self._described(place, nbytes)
        (extent,) = described.extents
        assert self._words is not None
        place.nbytes, place.blocks = nbytes, described.blocks
        place.pointer = self._segments[extent.packet].pointer + extent.offset
        place.ready = self._words.segment.pointer + described.line
        # Packed: this type matches every type that the receiver names.
        place.message = [described.pack(secret), DESCRIPTION_NBYTES, MPI.PACKED]

    def _set_up_words(self) -> None:
        self._words = self._allocate(2 * DONE, 0)
        # Before any description names the block: a count that is not 0 would let a receiver through.
        self._device.zero(self._words.segment.pointer, 2 * DONE)
        self._in_flight.set_up(self._words.segment.pointer)

    def _new_place(self, nbytes: int, *, whole: bool) -> Place:
        room = _room(nbytes)
        begin = self._take(room, whole=whole)
        few_nbytes = max(_LARGE_PLACES * room, min(_SMALL_PLACES * room, _SMALL_NBYTES))
        if begin is None and self._total_nbytes + room <= min(few_nbytes, self._most_nbytes):
            begin = self._grow(room, whole=whole)  # a wait for so few places would be a wait for most messages
        if begin is None or not self._in_flight.has_lines:
            found = self._await_place(nbytes)
            if found is not None:
                return found
            self._give_up_idle()
            begin = self._take(room, whole=whole) if begin is None else begin
        if begin is None:
            begin = self._grow(room, whole=whole)
        extents = self._extents(begin, room)
        has_line = self._in_flight.has_lines
        if not has_line or len(extents) > MOST_EXTENTS:
            self._release(begin, begin + room)
            what = f"free memory lies in more than {MOST_EXTENTS} blocks"
            raise OutboxFullError(what if has_line else f"{MOST_IN_FLIGHT} messages are in flight")
        return Place(begin, begin + room, extents, *self._in_flight.take_line())

    def _idle_place(self, nbytes: int) -> Place | None:
        """Return an idle place, one of another message of about the same length if need be; None without one."""
        if not self._idle[nbytes]:
            self._make_idle(self._in_flight.over())
        idle = self._idle[nbytes] or self._others_idle(nbytes)
        return idle.pop() if idle else None

    def _others_idle(self, nbytes: int) -> list[Place] | None:
        """Return idle places of messages of another length that have the same room; None without any."""
        room, found = _room(nbytes), None
        for other in [*self._idle]:
            if not self._idle[other]:
                del self._idle[other]
            elif _room(other) == room:
                found = self._idle[other]
                break
        return found

    def _make_idle(self, over: list[Place]) -> None:
        for place in over:
            if len(place.extents) == 1:
                self._idle[place.nbytes].append(place)
            else:
                self._give_up(place)

    def _take(self, room: int, *, whole: bool) -> int | None:
        for index, (begin, end) in enumerate(self._free):
            start = self._start_in(begin, end, room) if whole else begin
            if start is not None and end - start >= room:
                parts = (begin, start), (start + room, end)
                self._free[index : index + 1] = [part for part in parts if part[0] < part[1]]
                return start
        return None

    def _start_in(self, begin: int, end: int, room: int) -> int | None:
        """Find ``room`` bytes of one block in the free range from ``begin`` to ``end``; return None without them."""
        parts = ((max(begin, block.begin), min(end, block.end)) for block in self._blocks)
        return next((start for start, stop in parts if stop - start >= room), None)

    def _release(self, begin: int, end: int) -> None:
        index = bisect.bisect(self._free, (begin, end))
        if index < len(self._free) and self._free[index][0] == end:
            end = self._free.pop(index)[1]
        if index > 0 and self._free[index - 1][1] == begin:
            begin = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (begin, end))

    def _grow(self, room: int, *, whole: bool) -> int:
        """Allocate the bytes that are missing behind the last block; at least double the outbox: so blocks are few."""
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
        begin = self._take(room, whole=whole)
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
        block = Block(segment, handle.pack(), begin, begin + nbytes)
        self._segments[block.packet] = segment
        return block

    def _extents(self, begin: int, room: int) -> tuple[Extent, ...]:
        end = begin + room
        parts = ((block, max(begin, block.begin), min(end, block.end)) for block in self._blocks)
        return tuple(
            Extent(block.packet, start - block.begin, stop - start) for block, start, stop in parts if start < stop
        )

    def _await_place(self, nbytes: int) -> Place | None:
        """Return an idle place, and wait for one as long as the receivers take messages; None where they take none.

        A program that enqueues messages faster than its GPU copies them is held up here, because it would else fill all
        of the memory.
        """
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            left = len(self._in_flight)
            self._make_idle(self._in_flight.look())
            place = self._idle_place(nbytes)
            if place is not None:
                return place
            if len(self._in_flight) < left:
                until = time.monotonic() + _PATIENCE_S
        return None

    @property
    def _total_nbytes(self) -> int:
        return self._blocks[-1].end if self._blocks else 0

    def _give_up_idle(self) -> None:
        for places in self._idle.values():
            for place in places:
                self._give_up(place)
        self._idle.clear()

    def _give_up(self, place: Place) -> None:
        self._release(place.begin, place.end)
        self._in_flight.give_up_line(place)


def _room(nbytes: int) -> int:
    """Return the bytes of the place of a message."""
    return -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES


def _cut(extents: tuple[Extent, ...], nbytes: int) -> tuple[Extent, ...]:
    """Return the first ``nbytes`` bytes of a place; its range is longer by less than the last extent."""
    *whole, last = extents
    return (*whole, Extent(last.packet, last.offset, nbytes - sum(extent.nbytes for extent in whole)))
