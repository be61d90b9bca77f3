"""The activity page of this process, on which it publishes its calls for its peers and for the doctor.

Peers map the end of the page, from a log of their communicator on. The doctor opens the memory by its descriptor in
/proc/PID/fd, as every process of the same user may. Yama's ptrace_scope often blocks process_vm_readv, but not
/proc/PID/fd. So this process keeps the descriptor open: the mapping is not enough, because only root may open links in
/proc/PID/map_files.

Nothing here waits or takes a lock, because small calls write into the page, too.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from mpicomm.activity import layout
from mpicomm.activity.layout import CALL, CALL_BITS, CALL_TEXTS, COUNTS, LOG_DEPTH, OFFSETS, POSTS, READY, SINCE
from mpicomm.devices.handle import Descriptor
from mpicomm.devices.host import fence
from mpicomm.devices.host_memory import HostSegment, map_shared, memfd_create

_monotonic_ns = time.monotonic_ns
_CALL_MASK = layout.CALL_MASK
_MAX_TEXT_AGE = layout.TEXTS // 2
"""An older text is written anew, because later texts could overwrite it while the call is among the logged calls."""


def read_text(texts: memoryview, number: int) -> str | None:
    """Return the text of that number from the texts of a page of any process; None if it was overwritten."""
    at = layout.text_at(number)
    # Pairs with the second fence of `Page.write_text`: this rank reads the text after the word of the call, so the text
    # is complete.
    fence()
    text = bytes(texts[at + 8 : at + layout.TEXT_NBYTES]).partition(b"\0")[0].decode(errors="replace")
    # Pairs with the first fence of `Page.write_text`: this rank reads the number after the text. So the number differs
    # if this rank has read any byte of another text.
    fence()
    return text if int.from_bytes(texts[at : at + 8], sys.byteorder) == number else None


class Log:
    """A ring buffer of the calls of one communicator by kernels or mapped memory, in its node or in its peer domain.

    A call has a word with the number of its text, one with its count, and one with its offset. A rank writes them
    before it does anything else for the call.
    """

    __slots__ = ("_at", "_page", "_row", "calls", "number", "words")

    def __init__(self, page: Page, row: memoryview, at: int, number: int) -> None:
        self._page = page
        self._row = row
        self._at = at
        self.number = number
        self.words = page.bytes[at : at + layout.LOG_NBYTES].cast("q")
        self.calls = 0

    def post(self, text: str, count: int = 0, offset: int | None = None, *, ready: bool = False) -> None:
        """Publish the next call of this rank; local. Text beyond a kibibyte of UTF-8 is cut off.

        ``ready`` publishes that as `CallLog.publish_ready` does. Calls that differ only in numbers share a text.
        Readers fill ``count`` into it, and ``offset`` if the text has `layout.OFFSET_IN_TEXT`. A doctor that reads
        between the last of these lines may see the time of the previous call.
        """
        page = self._page
        number = page.texts.get(text)
        if number is None or page.newest - number > _MAX_TEXT_AGE:
            number = page.write_text(text)
        self.calls = call = self.calls + 1
        words, slot, tag = self.words, call % LOG_DEPTH, call & _CALL_MASK
        if offset is not None:
            words[OFFSETS + slot] = offset << CALL_BITS | tag
        words[COUNTS + slot] = count << CALL_BITS | tag
        words[CALL_TEXTS + slot] = number << CALL_BITS | tag
        words[POSTS] = call
        if ready:
            words[READY] = call
        self._row[CALL] = self.number
        words[SINCE] = _monotonic_ns()

    def export(self) -> HostSegment:
        """Return the memory that a peer maps to read the log: the page from there on."""
        page = self._page
        fd = Descriptor.of(os.dup, page.descriptor)
        return HostSegment(page.memory[self._at :], fd=fd, size=layout.NBYTES, offset=self._at)

    def clear(self) -> None:
        """Erase the calls for the next communicator with this row."""
        self.words.cast("B")[:] = bytes(layout.LOG_NBYTES)


class Page:
    """An activity page of this process. Raises `HandleError` if the system provides no shared memory."""

    def __init__(self, name: str = layout.MEMORY_NAME) -> None:
        self.descriptor = memfd_create(layout.NBYTES, name)  # only the parts that are written take memory
        self.memory = map_shared(self.descriptor, 0, layout.NBYTES)
        self.bytes = self.memory.data
        self._words = self.bytes[: layout.HEADER_NBYTES].cast("q")
        self._texts = self.bytes[layout.TEXTS_AT :]
        self._numbers = self._texts.cast("q")
        self._next = itertools.count(1)  # threads of several communicators may write at once, into different slots
        self.texts: dict[str, int] = {}
        """The number of each text in the page, and of some texts that were overwritten."""
        self.newest = 0
        """The number of the last text."""
        self.rows = list(reversed(range(layout.ROWS)))
        """The free rows."""
        self._words[layout.PID] = os.getpid()
        self.set_world(-1, 0)
        self._words[0] = layout.MAGIC
        self.is_own = True
        """Whether this process has made the page; a forked child has not, its parent has."""
        os.register_at_fork(after_in_child=partial(setattr, self, "is_own", False))

    def set_world(self, world_rank: int, world_size: int) -> None:
        """Publish the rank of this process in MPI.COMM_WORLD."""
        self._words[layout.WORLD_RANK], self.world_size = world_rank, world_size

    @contextmanager
    def step(self, text: str, ranks: str) -> Iterator[None]:
        """Publish, as long as the block lasts, that this process is in a step of ``ranks`` of MPI.COMM_WORLD."""
        words = self._words
        outer, outer_since_ns = words[layout.STEP], words[layout.STEP_SINCE]
        try:
            self._enter(text, ranks)
            yield
        finally:
            if self.is_own:
                words[layout.STEP_SINCE] = outer_since_ns
                words[layout.STEP] = outer  # last, as in `_enter`: otherwise the outer step would have the inner time

    def enter_final_step(self, text: str) -> None:
        """Publish that this process is in a step of all ranks of MPI.COMM_WORLD until the process ends."""
        self._enter(text, layout.ranks_as_text(range(self.world_size)))

    def write_names(self) -> None:
        """Publish the names of the calls by MPI."""
        names = b"".join(name.encode() + b"\0" for name in _numbers)
        nbytes = layout.NAMES.stop - layout.NAMES.start
        self.bytes[layout.NAMES] = names[:nbytes].ljust(nbytes, b"\0")

    def write_text(self, text: str) -> int:
        """Write a text, which stays until `layout.TEXTS` later texts are written; return its number."""
        number = next(self._next)
        at = layout.text_at(number)
        self._numbers[at // 8] = number
        # Pairs with the second fence of `read_text`: a reader that sees a byte of the new text also sees the new
        # number, which it reads afterwards. So it notices that the slot holds another text.
        fence()
        nbytes = layout.TEXT_NBYTES - 8
        self._texts[at + 8 : at + layout.TEXT_NBYTES] = text.encode()[: nbytes - 1].ljust(nbytes, b"\0")
        # Pairs with the first fence of `read_text`: a reader that sees the number in the word of a call also sees the
        # whole text.
        fence()
        if len(self.texts) > 2 * layout.TEXTS:
            self.texts.clear()
        self.texts[text] = self.newest = number
        return number

    def _enter(self, text: str, ranks: str) -> None:
        if not self.is_own:  # a forked child must not write into the page of its parent
            return
        text = f"{ranks} {text}"  # one text, so that one word publishes both
        number = self.texts.get(text)
        if number is None or self.newest - number > _MAX_TEXT_AGE:
            number = self.write_text(text)
        words = self._words
        words[layout.STEP_SINCE] = _monotonic_ns()
        # Last, because a doctor that reads this word reads the time of the step and its text next.
        words[layout.STEP] = number


class Member(NamedTuple):
    """A process of a communicator: host and pid identify it, and the number names it to people."""

    host: str
    pid: int
    number: int


class RowHeader:
    """What the rows of communicators and windows of the same processes share; ``rank`` is this process among them."""

    def __init__(self, rank: int, processes: Sequence[Member], device: int | str) -> None:
        digest = hashlib.blake2b(repr(list(map(tuple, processes))).encode(), digest_size=6).digest()
        self.digests = int.from_bytes(digest, "big"), ~int.from_bytes(digest, "big") & (1 << 48) - 1
        """Hashes of 48 bits: of the communicators of these processes, and of their windows."""
        numbers = [process.number for process in processes]
        is_world = numbers == list(range(page().world_size))
        self.name = "world" if is_world else f"rank{'s' * (len(numbers) > 1)} {layout.ranks_as_text(numbers)}"
        words = [0] * layout.WORDS
        words[layout.RANK], words[layout.SIZE] = rank, len(processes)
        words[layout.ON_GPU] = isinstance(device, int)
        words[layout.SOURCE] = words[layout.DEST] = layout.NOBODY
        self.row = array("q", words).tobytes().ljust(layout.ROW_NBYTES, b"\0")

    def next_number(self, *, window: bool = False) -> int:
        """Return the number of the next communicator, or window, of these processes, for `CommunicatorRow.publish`.

        It is the same in all these processes, because they make their communicators in one order.
        """
        digest = self.digests[window]
        number = _made[digest] = _made.get(digest, 0) + 1
        return number


class CommunicatorRow:
    """The row of one communicator or window on the page. The doctor reads it from `publish` until `hide`.

    Calls write into ``words`` directly, because a small call takes less than a microsecond. So the row is reused only
    after nothing refers to it.
    """

    __slots__ = ("_logs", "_number", "_page", "bytes", "words")

    def __init__(self) -> None:
        of = page()
        if not of.rows:  # the doctor sees only the first page
            if not any(each.rows for each in _pages):
                _pages.append(Page("mpicomm"))
            of = next(each for each in _pages if each.rows)
        self._page, number = of, of.rows.pop()
        self._number: int | None = number
        at = layout.row_at(number)
        self.bytes = of.bytes[at : at + layout.ROW_NBYTES]
        self.words = self.bytes.cast("q")
        self._logs: dict[int, Log] = {}  # most communicators log no call

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Release the row. At exit the modules are gone, and the memory ends with the process."""
        if not is_finalizing() and self._page.is_own and self._number is not None:
            self.words[layout.KEY] = 0
            for log in self._logs.values():
                log.clear()
            self._page.rows.append(self._number)

    def publish(self, row_header: RowHeader, number: int, *, window: bool = False) -> None:
        """Show the row to the doctor. ``number`` is from `RowHeader.next_number`, which got the same ``window``."""
        key = row_header.digests[window] << 15 | 1 << 14 | number & 0x3FFF
        name, nbytes = f"{'window of ' * window}{row_header.name}", layout.NAME.stop - layout.NAME.start
        self.bytes[:] = row_header.row  # it has no key yet, so the doctor skips the row while its texts change
        self.bytes[layout.NAME] = name.encode()[: nbytes - 1].ljust(nbytes, b"\0")
        self.words[layout.IS_WINDOW] = window
        self.words[layout.NUMBER] = number
        self.words[layout.KEY] = key  # last: pairs with the doctor's read of the key, which comes first

    def log(self, index: int) -> Log:
        """Return a log of the row; ``index`` is less than `layout.LOGS`."""
        if index not in self._logs:
            assert self._number is not None
            self._logs[index] = Log(self._page, self.words, layout.log_at(self._number, index), index + 1)
        return self._logs[index]

    def posted(self, rank: int) -> int:
        """Return how often this rank has named ``rank`` in Post of the window, modulo 256."""
        return self.bytes[layout.POSTED][rank]

    def count(self, counts: slice, ranks: int) -> None:
        """Count a call that names a set of ranks; ``counts`` is `layout.POSTED` or `layout.COMPLETED`."""
        numbers = self.bytes[counts]
        for rank in range(ranks.bit_length()):
            if ranks >> rank & 1:
                numbers[rank] = (numbers[rank] + 1) & 0xFF

    def retain(self) -> None:
        """Never reuse the row, because peers may still read it."""
        self._number = None

    def hide(self) -> None:
        """Hide the row from the doctor."""
        if self._page.is_own:  # a forked child has the objects of its parent, and the page of its parent
            self.words[layout.KEY] = 0


def mpi_call_number(name: str) -> int:
    """Return the value of `layout.CALL` for a collective call by MPI.

    Writing a text in each call would take too long. The page has the names of the numbers.
    """
    number = _numbers.get(name)
    if number is None:
        number = _numbers[name] = len(_numbers)
        if _pages:
            page().write_names()
    return -number


def begin_mpi_call(words: memoryview, call: int) -> None:
    """Publish that this rank begins a collective call by MPI; ``call`` is its `mpi_call_number`."""
    words[layout.CALLS_BY_MPI] += 1
    words[layout.CALL] = call


def page() -> Page:
    """Return the page of this process, and make it at first need. A forked child has the page of its parent."""
    if not _pages:
        _pages.append(Page())
        _pages[0].write_names()
    return _pages[0]


_pages: list[Page] = []
_numbers = {"": 0}  # of the names of calls by MPI
_made: dict[int, int] = {}  # how many communicators of the same processes there were, by the digest of `RowHeader`
