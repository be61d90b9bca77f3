"""The messages in flight: messages in the outbox that the receivers, as far as this rank knows, have not copied yet."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mpicomm.devices.base import MessageCopy
from mpicomm.devices.cuda.types import GpuBackend
from mpicomm.kernels.message import MESSAGE_WORDS
from mpicomm.messages.rendezvous_header import SLOT_KEY_NBYTES, piece_count, put_nbytes

LINE_NBYTES = 8 * MESSAGE_WORDS


# Slots compare by identity, and are not frozen, because every message takes an idle one or makes one.
@dataclass(slots=True, eq=False)
class OutboxSlot:
    """A range of the outbox with its line of words, which messages use one after the other."""

    block: Any
    """The block that holds the range."""
    offset: int
    """The bytes from the begin of the block to the range."""
    capacity: int
    """The bytes of the range."""
    pointer: int
    """The address of the range."""
    line: int
    """The number of its line."""
    ready: int
    """The address of the `ready` words of its line."""
    done: int
    """The address of the `done` words of its line."""
    header: list[Any]
    """The packed header, as MPI takes it."""
    nbytes: int = 0
    """The bytes of the message."""
    pieces: int = 1
    """The number of pieces of the message, which both ranks add to the words."""
    copy_in: MessageCopy | None = None
    """The kernel launch that copies messages into the slot."""

    def assign(self, nbytes: int) -> None:
        """Give the slot to a message of ``nbytes`` bytes."""
        # MPI has sent the header of the last message, because its receiver has released the slot, or MPI has refused
        # it.
        put_nbytes(self.header[0], SLOT_KEY_NBYTES, nbytes)
        self.nbytes = nbytes
        self.pieces = piece_count(nbytes)


MOST_IN_FLIGHT = 1024
DONE = MOST_IN_FLIGHT * LINE_NBYTES
"""The distance from a message's `ready` words to its `done` words.

All `done` words lie together, because the host reads them with one copy.
"""
_FEW = 32  # messages: with fewer, a poll of the counts would cost each message too much
_FEW_NBYTES = 16 << 20


class InFlight:
    """The messages in flight and their lines. The outbox calls it under its lock.

    Each message has a line of words in a block that holds all lines. A line has some `ready` words, which only the
    sender's stream stores, and as many `done` words, which only the receiver's stream stores. The counts only grow: the
    next message of a line counts on from the last count. So no rank has to clear a line, which would need an order with
    the stores of peers.

    A *poll* copies the `done` words to the host, which show the messages that are complete. `add` begins a poll if
    enough messages are in flight, so early that the copy is there when the outbox needs their slots.
    """

    def __init__(self, device: GpuBackend) -> None:
        self._device = device
        self.total_nbytes = 0
        """The bytes of all blocks with slots."""
        self.free_lines = list(reversed(range(MOST_IN_FLIGHT)))
        """The free lines; the lowest go first."""
        self._used = 0  # no message has used this line or a later one
        # The counts of the words of a line when its last message is complete. The two names are views of one array.
        self._expected = np.zeros((MOST_IN_FLIGHT, 1), np.uint64)
        self._expected_of = self._expected.data.cast("B").cast("Q")
        self._slots: dict[int, OutboxSlot] = {}  # by line
        self._nbytes = 0
        self._poll_from = _FEW  # so many messages in flight are worth a poll
        self._poll_from_nbytes = _FEW_NBYTES  # and so are messages of so many bytes
        self._words = 0  # the address of the `done` words
        # The copy of the `done` words, in pinned memory: a row for each line.
        self._done: npt.NDArray[np.uint64] = np.zeros((0, MESSAGE_WORDS), np.uint64)
        self._copy = 0  # its address
        self._copied: Callable[[], bool] | None = None  # whether the copy of the begun poll is there
        self._stream = 0  # the stream of the copies

    def set_up(self, lines: int) -> None:
        """Take the address of all lines. Their words are 0."""
        self._words = lines + DONE
        self._done = self._device.pinned(DONE).view(np.uint64).reshape(-1, MESSAGE_WORDS)
        self._done[:] = 0  # so that a line which no copy has reached counts as in flight
        self._copy = self._done.ctypes.data
        self._stream = self._device.side_streams.acquire()  # the device destroys it with all side streams

    def __len__(self) -> int:
        return len(self._slots)

    def acquire_line(self) -> int:
        """Return a free line."""
        line = self.free_lines.pop()
        self._used = max(self._used, line + 1)
        return line

    def add(self, slot: OutboxSlot) -> None:
        """Add the message of a slot. Begin a poll if it is worth it."""
        slots, line = self._slots, slot.line
        slots[line] = slot
        self._expected_of[line] += slot.pieces
        self._nbytes += slot.capacity
        if self._copied is None and (len(slots) >= self._poll_from or self._nbytes >= self._poll_from_nbytes):
            self._begin_copy()

    def completed(self) -> list[OutboxSlot]:
        """Return, once, the slots whose messages were complete at the begun poll. It does not wait."""
        return self._use_copy() if self._copied is not None and self._copied() else []

    def poll(self) -> list[OutboxSlot]:
        """As `completed`, by a poll that begins now. It waits for its copy, but not for work of the user."""
        found: list[OutboxSlot] = []
        for _ in range(1 if self._copied is None else 2):  # the begun copy may be old
            if not self._slots:  # at the start, or after the old copy
                break
            if self._copied is None:
                self._begin_copy()
            self._wait_for_copy()
            found += self._use_copy()
        return found

    def close(self) -> None:
        """Wait for the begun copy, because it reads the lines and writes into host memory."""
        self._wait_for_copy()
        self._copied = None
        self._done = self._done[:0]
        self._slots.clear()

    def _wait_for_copy(self) -> None:
        while self._copied is not None and not self._copied():
            os.sched_yield()  # other threads of the program can run; time.sleep(0) takes longer than most copies

    def _begin_copy(self) -> None:
        """Begin to copy the `done` words to the host, on a stream that has no other work. It does not wait."""
        # Pairs with the receivers' stores of `done` in message.cu, which come after the loads of the message. So work
        # that is enqueued after the host has seen the copy may overwrite a message if the copy has its `done`. A
        # message without its `done` in the copy keeps its slot.
        self._device.copy(self._copy, self._words, self._used * LINE_NBYTES, self._stream)
        self._copied = self._device.completion(self._stream)

    def _use_copy(self) -> list[OutboxSlot]:
        self._copied = None
        # A message that was sent after the copy was begun has a count that the copy lacks. NumPy compares all lines at
        # once, because a comparison for each slot would cost a message some tenths of a microsecond.
        used, slots = self._used, self._slots
        differ = (self._done[:used] != self._expected[:used]).any(axis=1)
        left = {line: slots.pop(line) for line in differ.nonzero()[0].tolist() if line in slots}
        self._slots = left
        self._nbytes = sum(slot.capacity for slot in left.values())
        # So all polls together cost each message a bounded time, even if many messages stay in flight.
        self._poll_from = max(_FEW, 2 * len(left))
        self._poll_from_nbytes = max(self.total_nbytes // 2, 2 * self._nbytes, _FEW_NBYTES)
        return list(slots.values())
