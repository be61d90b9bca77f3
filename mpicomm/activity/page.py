"""Page: the memory in which this process describes its calls, so that the doctor can read them from outside.

The doctor opens the memory by its descriptor in /proc/PID/fd. The kernel allows this to every process of the same user.
Yama often keeps a process from reading the memory of another process, but it does not forbid this. So this process
keeps the descriptor open: the mapping is not enough, because only root may open links in /proc/PID/map_files.

Nothing here waits or takes a lock, because small calls write into the page, too. If two threads write at once, the
doctor may read a mixture of two texts.
"""

from __future__ import annotations

import copy
import hashlib
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

from mpicomm.activity import layout
from mpicomm.activity.ranks import ranks_as_text

_monotonic_ns = time.monotonic_ns


class PageRow(NamedTuple):
    """The part of the page for one communicator, as bytes and as words."""

    bytes: memoryview
    words: memoryview
    is_read: bool
    """Whether the doctor can read the row."""


class Page:
    """The memory of this process. If the system provides no shared memory, no process reads the page."""

    def __init__(self) -> None:
        self._bytes = memoryview(_allocate())
        self._words = self._bytes[: layout.HEADER_NBYTES].cast("q")
        self._unused = iter(range(layout.ROWS))
        self._given_back: list[PageRow] = []
        self._positions: dict[str, int] = {}
        self._words[layout.PID] = os.getpid()
        self._words[layout.WORLD_RANK] = -1
        self._words[0] = layout.MAGIC
        self.is_own = True
        """Whether this process has made the page; a forked child has not, its parent has."""
        os.register_at_fork(after_in_child=self._disown)

    def introduce(self, world_rank: int, world_size: int) -> None:
        """Say which rank of MPI.COMM_WORLD this process is."""
        self._words[layout.WORLD_RANK] = world_rank
        self._words[layout.WORLD_SIZE] = world_size

    @property
    def world_size(self) -> int:
        """The ranks of MPI.COMM_WORLD."""
        return self._words[layout.WORLD_SIZE]

    @contextmanager
    def step(self, text: str, ranks: str) -> Iterator[None]:
        """Say, as long as the block lasts, that this process is in a step of ``ranks`` of MPI.COMM_WORLD."""
        words = self._words
        outer, outer_since_ns = words[layout.STEP], words[layout.STEP_SINCE]
        try:
            self._enter(text, ranks)
            yield
        finally:
            if self.is_own:
                words[layout.STEP_SINCE] = outer_since_ns
                words[layout.STEP] = outer  # last, as in `_enter`: otherwise the outer step would have the inner time

    def enter_last(self, text: str) -> None:
        """Say that this process is in a step of all ranks of MPI.COMM_WORLD, and stays in it until the process ends."""
        self._enter(text, ranks_as_text(range(self.world_size)))

    def position(self, text: str) -> int:
        """Return where a text begins. Write the text first if it is not in the ring."""
        end = self._words[layout.TEXTS_END]
        found = self._positions.get(text)
        if found is not None and end - found <= layout.TEXTS_NBYTES:
            return found
        encoded = text.encode()[: layout.TEXTS_NBYTES // 8] + b"\0"
        start = end % layout.TEXTS_NBYTES
        if start + len(encoded) > layout.TEXTS_NBYTES:  # a text lies in one piece
            end += layout.TEXTS_NBYTES - start
            start = 0
        if len(self._positions) > layout.TEXTS_NBYTES // 16:
            self._positions.clear()
        # Before the bytes, so that a reader that finds the new bytes knows which texts they overwrite.
        self._words[layout.TEXTS_END] = end + len(encoded)
        at = layout.TEXTS_AT + start
        self._bytes[at : at + len(encoded)] = encoded
        self._positions[text] = end
        return end

    def take_row(self) -> PageRow:
        """Return a free row. If all rows are taken, return a row that no process reads."""
        try:
            return self._given_back.pop()
        except IndexError:
            number = next(self._unused, None)
        if number is None:
            memory = memoryview(bytearray(layout.ROW_NBYTES))
        else:
            at = layout.ROWS_AT + number * layout.ROW_NBYTES
            memory = self._bytes[at : at + layout.ROW_NBYTES]
        return PageRow(memory, memory.cast("q"), number is not None)

    def give_row(self, row: PageRow) -> None:
        """Let another communicator have a row."""
        if row.is_read:
            self._given_back.append(row)

    def _disown(self) -> None:
        self.is_own = False

    def _enter(self, text: str, ranks: str) -> None:
        if not self.is_own:  # a forked child must not write into the page of its parent
            return
        position = self.position(layout.step_text(text, ranks))
        words = self._words
        words[layout.STEP_SINCE] = _monotonic_ns()
        # Last, because a doctor that reads this word reads the time of the step and its text next.
        words[layout.STEP] = position + 1


class Member(NamedTuple):
    """A process of a communicator: host and pid identify it, and the number names it to people."""

    host: str
    pid: int
    number: int


class Heading:
    """The words and texts that the rows of all communicators of the same processes have in common on this rank.

    ``rank`` among ``processes`` is this one; ``node_ranks`` are the ranks on this node.
    """

    def __init__(self, rank: int, processes: Sequence[Member], node_ranks: Sequence[int], device: int | str) -> None:
        digest = hashlib.blake2b(repr(list(map(tuple, processes))).encode(), digest_size=6).digest()
        self._digest = int.from_bytes(digest, "big")
        numbers = [process.number for process in processes]
        is_world = numbers == list(range(page().world_size))
        self._name = name = "world" if is_world else f"rank{'s' * (len(numbers) > 1)} {ranks_as_text(numbers)}"
        self.row = bytearray(layout.ROW_NBYTES)
        words = memoryview(self.row)[: 8 * layout.WORDS].cast("q")
        words[layout.RANK], words[layout.SIZE] = rank, len(processes)
        words[layout.ON_GPU] = isinstance(device, int)
        words[layout.SOURCE] = words[layout.DEST] = layout.NOBODY
        _write(memoryview(self.row), layout.NAME, name)
        _write(memoryview(self.row), layout.NODE_RANKS, ranks_as_text(node_ranks))

    def of_windows(self) -> Heading:
        """Return the heading of the windows of these processes."""
        heading = copy.copy(self)
        heading._digest = ~self._digest & (1 << 48) - 1
        heading.row = bytearray(self.row)
        memory = memoryview(heading.row)
        _write(memory, layout.NAME, f"window of {self._name}")
        _write(memory, layout.NODE_RANKS, "")
        memory[: 8 * layout.WORDS].cast("q")[layout.IS_WINDOW] = 1
        return heading

    def count(self) -> tuple[int, int]:
        """Return the key and the number of another communicator of these processes.

        They are the same in all its processes, because these make their communicators in one order.
        """
        number = _made.get(self._digest, 0) + 1
        _made[self._digest] = number
        return self._digest << 15 | 1 << 14 | number & 0x3FFF, number


class CommunicatorRow:
    """The part of the page for one communicator. The doctor reads it from `open` until `close`.

    Calls write into ``words`` directly, because a small call takes less than a microsecond. So another communicator
    gets the row only after nothing refers to it.
    """

    __slots__ = ("_page", "_position", "_row", "_text", "words")

    def __init__(self) -> None:
        self._page = page()
        self._row = self._page.take_row()
        self.words = self._row.words
        self._text = ""
        self._position = 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Let another communicator have the row. At exit the modules are gone, and the memory ends with the process."""
        if not is_finalizing() and self._page.is_own:
            self.words[layout.KEY] = 0
            self._page.give_row(self._row)

    def open(self, heading: Heading) -> None:
        """Let the doctor read the row."""
        key, number = heading.count()
        self._row.bytes[:] = heading.row  # it has no key yet, so the doctor skips the row while its texts change
        self.words[layout.NUMBER] = number
        self.words[layout.KEY] = key  # last: pairs with the doctor's read of the key, which comes first

    def post(self, text: str, count: int = 0, offset: int | None = None) -> None:
        """Say that this rank begins a collective call; readers fill ``count`` and ``offset`` into the text.

        A doctor that reads between these lines may see the numbers or the text of the previous call.
        """
        if text is not self._text:
            self._text, self._position = text, self._page.position(text) + 1
            self.words[layout.POST] = self._position
        words = self.words
        words[layout.POSTS] += 1
        words[layout.COUNT] = count
        if offset is not None:  # else the text has no place for it
            words[layout.OFFSET] = offset
        words[layout.CALL] = self._position
        words[layout.SINCE] = _monotonic_ns()

    def close(self) -> None:
        """Hide the row from the doctor."""
        if self._page.is_own:  # a forked child has the objects of its parent, and the page of its parent
            self.words[layout.KEY] = 0


class WindowRow(CommunicatorRow):
    """The part of the page for one window."""

    __slots__ = ()

    def posted(self, rank: int) -> int:
        """Return how often this rank has named ``rank`` in Post, modulo 256."""
        return self._row.bytes[layout.POSTED][rank]

    def count(self, counts: slice, ranks: int) -> None:
        """Count a call that names a set of ranks; ``counts`` is `layout.POSTED` or `layout.COMPLETED`."""
        numbers = self._row.bytes[counts]
        for rank in range(ranks.bit_length()):
            if ranks >> rank & 1:
                numbers[rank] = (numbers[rank] + 1) & 0xFF


def begin_by_mpi(words: memoryview, call: int) -> None:
    """Say that this rank begins a collective call that MPI carries out; ``call`` is `layout.by_mpi` of its name."""
    words[layout.CALLS_BY_MPI] += 1
    words[layout.CALL] = call


@cache
def page() -> Page:
    """Return the page of this process, and make it at first need. A forked child has the page of its parent."""
    return Page()


_made: dict[int, int] = {}  # how many communicators of the same processes there were, by the digest of `Heading`


def _allocate() -> mmap.mmap | bytearray:
    try:
        fd = os.memfd_create(layout.MEMORY_NAME, os.MFD_CLOEXEC)
    except OSError:
        return bytearray(layout.NBYTES)
    try:
        os.ftruncate(fd, layout.NBYTES)  # the system provides pages only for the parts that this process fills
        return mmap.mmap(fd, layout.NBYTES)  # mmap duplicates the descriptor and keeps it open
    except OSError:
        return bytearray(layout.NBYTES)
    finally:
        os.close(fd)


def _write(memory: memoryview, place: slice, text: str) -> None:
    nbytes = place.stop - place.start
    memory[place] = text.encode()[: nbytes - 1].ljust(nbytes, b"\0")
