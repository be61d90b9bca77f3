"""The outbox: memory of this rank's device in which messages lie until their receivers have copied them."""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from mpi4py import MPI

from mpicomm.devices.base import MessageStep, Segment
from mpicomm.devices.memory_use import MemoryUse
from mpicomm.errors import HandleError
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages.description import (
    DESCRIPTION_NBYTES,
    MOST_EXTENTS,
    Description,
    Extent,
    is_for_kernels,
)
from mpicomm.messages.device import MessageDevice

FIRST_BLOCK_NBYTES = 32 << 20
BLOCK_NBYTES = 2 << 20
"""Blocks are multiples of this: whole allocations of the driver, so that a peer that opens one sees nothing else."""
MOST_IN_FLIGHT = 1024
PART = 64
"""The outbox takes no more than this part of the device's memory."""
LINE_NBYTES = 8 * MESSAGE_WORDS
DONE = MOST_IN_FLIGHT * LINE_NBYTES
"""The distance from a message's `ready` words to its `done` words. All `done` words lie together, because the host
reads them with one copy."""
_GRAIN_NBYTES = 64 << 10  # a message takes a multiple of this, so that few small holes are left
_FEW_PLACES = 16
_PATIENCE_S = 2e-4  # about as long as it takes to allocate memory, and to open it on the other rank
_FEW = 64  # messages in flight: a look at the counts for fewer would cost each message too much


class OutboxFullError(Exception):
    """The outbox has no room for a message; the text says why."""


@dataclass
class Block:
    """An allocation: its segment, the packed handle with which peers open it, and its range in the outbox."""

    segment: Segment
    packet: bytes
    begin: int
    end: int


# Compared by identity, and not frozen, because every message makes one or takes one that is idle.
@dataclass(slots=True, eq=False)
class Place:
    """The range of a message in the outbox, and its line of words."""

    begin: int
    end: int
    line: int
    extents: tuple[Extent, ...]
    """The whole range."""
    last: int
    """The count that its words have when the message has been copied."""
    blocks: int = 1
    """The blocks of the step that copies the message here, and so the words that say when it is copied from here."""
    # `Outbox.take_idle` sets the rest.
    nbytes: int = 0
    """The bytes of the message."""
    pointer: int = 0
    """The address of the range, which lies in one block."""
    ready: int = 0
    """The address of its line."""
    message: list[Any] = field(default_factory=list)
    """The packed description as MPI takes it."""
    step: MessageStep | None = None
    """Copies the message here."""


class Outbox:
    """A range of bytes of which each message takes a part. It grows by blocks; a message may lie in several of them.

    Each message has a line of words in a block that holds all lines: some `ready` words, which only the sender's stream
    stores, and as many `done` words, which only the receiver's stream stores. The counts only grow: the next message
    with the same line counts on from where the last one stopped. So nothing has to clear a line, which would need an
    order with the stores of peers.

    The host learns from a copy of the `done` words which places are free. It waits for the copy only where the outbox
    is full. A place that is free stays as it is for the next message of its size, because programs repeat sizes; all
    such *idle* places are given up where another message has no room.

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
        self._lines = list(range(MOST_IN_FLIGHT))
        self._counts = [0] * MOST_IN_FLIGHT  # of the lines that no place has
        self._in_flight: list[Place] = []
        self._idle: defaultdict[int, list[Place]] = defaultdict(list)  # by the bytes of their range
        self._in_flight_nbytes = 0
        self._look_from = _FEW  # as many messages in flight are worth a look at the counts
        self._look_from_nbytes = FIRST_BLOCK_NBYTES // 2  # and so are messages of as many bytes
        self._done: npt.NDArray[np.uint8] | None = None  # the copy of the `done` words
        self._copied: Callable[[], bool] | None = None  # whether the copy that was begun is over
        self._stream = 0  # of the copies

    def reserve(self, nbytes: int, *, whole: bool = False) -> Description:
        """Give a message its place: in one block if it is for kernels, or ``whole``.

        Raises `OutboxFullError`, or `HandleError` where memory cannot be allocated.
        """
        with self._lock:
            room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
            if room > self._most_nbytes:
                raise self._too_small_for(room)
            if self._words is None:
                self._set_up_words()
            place = self._idle_place(room) or self._new_place(room, whole=whole or is_for_kernels(nbytes))
            described = self._described(place, nbytes)
            place.nbytes, place.blocks = 0, described.blocks  # 0: its packed description is of another message
            self._begin(place, described.counts, place.end - place.begin)
            return described

    def take_idle(self, nbytes: int, secret: bytes) -> Place | None:
        """Give a message that kernels copy an idle place with its packed description; return None if none is idle.

        It takes a fifth of the time of `reserve`.
        """
        with self._lock:
            room = -(-nbytes // _GRAIN_NBYTES) * _GRAIN_NBYTES
            idle = self._idle.get(room)
            place = idle.pop() if idle else self._idle_place(room)
            if place is None:
                return None
            if place.nbytes != nbytes:
                self._prepare(place, nbytes, secret)
            self._begin(place, 1, room)
            return place

    def put_back(self, place: Place) -> None:
        """Make the place of a message idle that this rank does not send, and for which nothing is enqueued."""
        with self._lock:
            place.last -= 1
            self._in_flight.remove(place)
            self._in_flight_nbytes -= place.end - place.begin
            self._idle[place.end - place.begin].append(place)

    def find(self, packet: bytes) -> Segment | None:
        """Return the block of this outbox with that packed handle, None for a block of a peer."""
        return self._segments.get(packet)

    def is_drained(self) -> bool:
        """Return whether the receivers have copied all messages."""
        with self._lock:
            self._look()
            return not self._in_flight

    def memory_use(self) -> MemoryUse:
        """Return the memory of all blocks."""
        with self._lock:
            return MemoryUse("outbox", device_nbytes=sum(segment.nbytes for segment in self._segments.values()))

    def close(self) -> None:
        """Free all blocks; every peer must have closed them. A second call does nothing."""
        with self._lock:
            with contextlib.suppress(HandleError):  # a device that has failed copies no more
                self._await_copy()  # which reads a block and writes into memory of the host
            while self._segments:
                self._segments.popitem()[1].close()
            self._words = self._done = self._copied = None
            self._blocks.clear()
            self._free.clear()
            self._in_flight.clear()
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

    def _begin(self, place: Place, counts: int, room: int) -> None:
        place.last += counts
        in_flight = self._in_flight
        in_flight.append(place)
        self._in_flight_nbytes += room
        # So early that the copy is over when the idle places are used up.
        if self._copied is None and (
            len(in_flight) >= self._look_from or self._in_flight_nbytes >= self._look_from_nbytes
        ):
            self._begin_copy()

    def _set_up_words(self) -> None:
        self._words = self._allocate(2 * DONE, 0)
        # Before any description names the block: a count that is not 0 would let a receiver through.
        self._device.zero(self._words.segment.pointer, 2 * DONE)
        self._done = self._device.pinned(DONE)
        self._done[:] = 0  # a look copies some lines alone, and no other line may seem to be over
        self._stream = self._device.side_streams.take()  # which the device destroys with all others

    def _new_place(self, room: int, *, whole: bool) -> Place:
        begin = self._take(room, whole=whole)
        if begin is None and self._total_nbytes + room <= min(_FEW_PLACES * room, self._most_nbytes):
            begin = self._grow(room, whole=whole)  # a wait for so few places would be a wait for most messages
        if begin is None or not self._lines:
            found = self._await_place(room)
            if found is not None:
                return found
            self._give_up_idle()
            begin = self._take(room, whole=whole) if begin is None else begin
        if begin is None:
            begin = self._grow(room, whole=whole)
        extents = self._extents(begin, room)
        if not self._lines or len(extents) > MOST_EXTENTS:
            self._release(begin, begin + room)
            what = f"free memory lies in more than {MOST_EXTENTS} blocks"
            raise OutboxFullError(what if self._lines else f"{MOST_IN_FLIGHT} messages are in flight")
        line = self._lines.pop()
        return Place(begin, begin + room, line, extents, self._counts[line])

    def _idle_place(self, room: int) -> Place | None:
        idle = self._idle.get(room)
        if not idle and self._copied is not None and self._copied():
            self._use_copy()
            idle = self._idle.get(room)
        return idle.pop() if idle else None

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

    def _await_place(self, room: int) -> Place | None:
        """Return an idle place, and wait for one as long as the receivers take messages; None where they take none.

        A program that enqueues messages faster than its GPU copies them is held up here, because it would else fill all
        of the memory.
        """
        until = time.monotonic() + _PATIENCE_S
        while time.monotonic() < until:
            left = len(self._in_flight)
            self._look()
            place = self._idle_place(room)
            if place is not None:
                return place
            if len(self._in_flight) < left:
                until = time.monotonic() + _PATIENCE_S
        return None

    def _look(self) -> None:
        """Make the places idle whose messages are copied by now. It waits for a copy, and for no work of the user."""
        for _ in range(1 if self._copied is None else 2):  # the copy that was begun may be old
            if not self._in_flight:  # from the start, or since the old copy was used
                return
            if self._copied is None:
                self._begin_copy()
            self._await_copy()
            self._use_copy()

    def _await_copy(self) -> None:
        while self._copied is not None and not self._copied():
            time.sleep(0)  # lets other threads of the program run

    def _begin_copy(self) -> None:
        """Begin to copy the `done` words to the host, on a stream that has no other work. It does not wait."""
        assert self._words is not None and self._done is not None
        # Pairs with the receivers' stores of `done` in message.cu: they come after the loads of the message. So work
        # that is enqueued after the host has seen the copy may overwrite a message whose `done` is in it. A message
        # whose `done` is not there yet keeps its place.
        lines = [place.line for place in self._in_flight]
        begin, end = min(lines) * LINE_NBYTES, (max(lines) + 1) * LINE_NBYTES
        words = self._words.segment.pointer + DONE
        self._device.copy(self._done.ctypes.data + begin, words + begin, end - begin, self._stream)
        self._copied = self._device.completion(self._stream)

    def _use_copy(self) -> None:
        assert self._done is not None
        self._copied = None
        # Plain numbers, because NumPy takes longer for a few words of each place.
        done = self._done.data.cast("Q")
        left = []
        for place in self._in_flight:
            first, words, last = place.line * MESSAGE_WORDS, place.blocks, place.last
            # A message that was sent after the copy was begun has a count that is not there.
            if done[first] != last or (words > 1 and done[first : first + words].tolist().count(last) < words):
                left.append(place)
            elif len(place.extents) == 1:
                self._idle[place.end - place.begin].append(place)
            else:
                self._give_up(place)
        self._in_flight = left
        self._in_flight_nbytes = sum(place.end - place.begin for place in left)
        # So the looks together cost each message a bounded time, however many messages stay in flight.
        self._look_from = max(_FEW, 2 * len(left))
        self._look_from_nbytes = max(self._total_nbytes // 2, 2 * self._in_flight_nbytes)

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
        self._lines.append(place.line)
        self._counts[place.line] = place.last


def _cut(extents: tuple[Extent, ...], nbytes: int) -> tuple[Extent, ...]:
    """Return the first ``nbytes`` bytes of a place; its range is longer by less than the last extent."""
    *whole, last = extents
    return (*whole, Extent(last.packet, last.offset, nbytes - sum(extent.nbytes for extent in whole)))
