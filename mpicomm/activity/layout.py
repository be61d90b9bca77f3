"""The layout of an activity page: shared memory in which a process publishes its calls, as int64 words and UTF-8.

A page has a header, a row for each communicator and each window, logs of calls, and the texts of calls. Each row has
`LOGS` logs, because a communicator logs the calls of its node apart from the calls of its peer domain if these differ.
The texts have numbers, and text n lies in slot n modulo `TEXTS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import chain, islice

MEMORY_NAME = "mpicomm-activity"
"""The name of the memory, as the links in /proc/PID/fd show it."""
MAGIC = 0x39796C706D6F6368
"""The first word. Its last byte changes with the layout."""

HEADER_NBYTES = 4096
ROW_NBYTES = 384
ROWS = 1024
LOG_NBYTES = 2560
LOGS = 2
TEXT_NBYTES = 1024
TEXTS = 256
ROWS_AT = HEADER_NBYTES
LOGS_AT = ROWS_AT + ROWS * ROW_NBYTES
TEXTS_AT = LOGS_AT + ROWS * LOGS * LOG_NBYTES
NBYTES = TEXTS_AT + TEXTS * TEXT_NBYTES

# Words of the header.
PID = 1
WORLD_RANK = 2
STEP = 3  # the number of the text of a step, with its ranks of MPI.COMM_WORLD before it; 0 outside of a step
STEP_SINCE = 4  # when the step began, in nanoseconds of the monotonic clock
HEADER_WORDS = 5
# The names of collective calls by MPI, in the order of their numbers, each terminated by a zero byte.
NAMES = slice(512, HEADER_NBYTES)

# Words of a row.
KEY = 0  # names the communicator, the same in all its processes; 0 if the row is free
RANK = 1
SIZE = 2
CALLS_BY_MPI = 3  # how many collective calls by MPI this rank has begun
CALL = 4  # the last collective call: 1 + the index of its log, or `page.mpi_call_number` of its name
RECEIVES = 5  # how many blocking receives and probes this rank has begun
SOURCE = 6  # the source of the receive that is in progress, or `NOBODY`
TAG = 7
SENDS = 8  # how many blocking sends this rank has begun
DEST = 9  # the destination of the send that is in progress, or `NOBODY`
SEND_TAG = 10
ON_GPU = 11  # whether the communicator has GPUs, so that calls with a text may have enqueued their work
NUMBER = 12  # tells this communicator from other communicators of the same processes, which have the same name
IS_WINDOW = 13  # 1 in the row of a window, whose collective calls are its fences
WORDS = 14
# The name of a communicator, in bytes of its row.
NAME = slice(8 * WORDS, 272)
# The row of a window has counts: bytes, one for each rank of the window, that wrap around.
MAX_WINDOW_RANKS = 56
POSTED = slice(NAME.stop, NAME.stop + MAX_WINDOW_RANKS)
"""How often this rank has named a rank in Post."""
COMPLETED = slice(POSTED.stop, POSTED.stop + MAX_WINDOW_RANKS)
"""How often this rank has named a rank in Complete."""

# Words of a log, which has the calls by kernels or mapped memory.
POSTS = 0  # how many calls this rank has begun
SINCE = 1  # when the last call began, in nanoseconds of the monotonic clock
READY = 2  # the call of `CallLog.publish_ready`
WAITING_FOR = 3  # 1 + the rank of another domain for which this rank waits; 0 if it waits for none
HEARTBEAT = 4  # grows during that wait
# The calls of a log. Ranks that do not wait for each other notice a mismatch only some calls later.
LOG_DEPTH = 16
CALL_TEXTS = 5  # the numbers of the texts of these calls
COUNTS = CALL_TEXTS + LOG_DEPTH  # the numbers that replace `COUNT_IN_TEXT` in these texts
OFFSETS = COUNTS + LOG_DEPTH  # the numbers that replace `OFFSET_IN_TEXT`
VOTES = OFFSETS + LOG_DEPTH  # where the buffers of this rank's calls lie, see `VOTE_WORDS`
LOG_WORDS = VOTES
VOTE_WORDS = 256
VOTE_BITS = 4
"""A word has 16 successive votes, as two bits each: 0 is no vote yet, 1 is for GPUs, and 3 is for the host. The upper
half of the word is the number of its first vote, divided by 16. So one store publishes a vote, and readers notice that
a later vote has overwritten it. The words are of up to 4096 votes, because no rank gets so many calls ahead of a rank
that takes part in them."""
CALL_BITS = 8
"""The lowest bits of a word of a logged call are those of its number, so that readers notice that the word is not there
yet, or that a later call has overwritten it."""
CALL_MASK = (1 << CALL_BITS) - 1

COUNT_IN_TEXT = "\x1a"
"""Stands for a count in the text of a call, so that calls that differ only in a count share a text. No text of a user
has this character."""
OFFSET_IN_TEXT = "\x1c"
"""Stands for the offset of the output in a symmetric array, as `COUNT_IN_TEXT` stands for a count."""

NOBODY = -(1 << 40)
"""In place of a rank: it is no constant of any MPI, such as MPI.ANY_SOURCE."""


def row_at(row: int) -> int:
    """Return the offset of a row in the page."""
    return ROWS_AT + row * ROW_NBYTES


def log_at(row: int, index: int) -> int:
    """Return the offset of a log in the page."""
    return LOGS_AT + (LOGS * row + index) * LOG_NBYTES


def text_at(number: int) -> int:
    """Return the offset of a text from `TEXTS_AT` on: a word with its number, then its bytes."""
    return number % TEXTS * TEXT_NBYTES


def format_call(text: str, count: int, offset: int) -> str:
    """Return the text of a call, with its numbers filled in."""
    return text.replace(COUNT_IN_TEXT, str(count)).replace(OFFSET_IN_TEXT, str(offset))


def logged_call(log: memoryview, call: int, read_text: Callable[[int], str | None]) -> str | None:
    """Return the text of a call of a log; None if it is not there yet or was overwritten.

    ``read_text`` returns the text of that number, None if it was overwritten.
    """
    slot = call % LOG_DEPTH
    word = log[CALL_TEXTS + slot]
    if (word ^ call) & CALL_MASK:
        return None
    text = read_text(word >> CALL_BITS)
    count, offset = log[COUNTS + slot], log[OFFSETS + slot]
    if text is None or (count ^ call) & CALL_MASK or (OFFSET_IN_TEXT in text and (offset ^ call) & CALL_MASK):
        return None
    return format_call(text, count >> CALL_BITS, offset >> CALL_BITS)


_MAX_RANKS = 1 << 20
_RANGE = re.compile(r"(?<![^,])(?:(\d{1,24})(?:-(\d{1,24}))?|\?)(?![^,])")
"""A rank, a range of ranks, or "?", between commas."""


def ranks_as_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, with ranges: "0-3,8". A negative number, which is no rank, becomes "?"."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank >= 0 and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ",".join("?" if low < 0 else str(low) if low == high else f"{low}-{high}" for low, high in ranges)


def ranks_of_text(text: str) -> tuple[int, ...]:
    """Return the ranks of a text of `ranks_as_text`, 2^20 at most; -1 for each "?".

    The text may come from another process: parts that are malformed or cut off are left out.
    """
    parts = _RANGE.finditer(text)
    ranks = (range(int(part[1]), int(part[2] or part[1]) + 1) if part[1] else (-1,) for part in parts)
    return tuple(islice(chain.from_iterable(ranks), _MAX_RANKS))
