"""Reads the activity page of another process. Imports no MPI.

Root may look at processes of anybody, who may have written anything into the page. So what is read is bounded, texts
are made printable, and the page is read by pread: a mapping would kill this process by SIGBUS if the other process
truncated the memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from mpicomm.activity import layout
from mpicomm.activity.layout import ranks_of_text

_LINK = f"/memfd:{layout.MEMORY_NAME}"
_ROWS = range(layout.ROWS)
_MAX_CHARS = 2000  # of a text for people
_MAX_SIZE = 1 << 24


class OtherVersionError(Exception):
    """The process has a page of another version of mpicomm."""


def printable(text: str) -> str:
    """Return a text of another process, shortened, as ASCII without the control characters that steer a terminal."""
    return "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in text[:_MAX_CHARS])


class BlockedMessage(NamedTuple):
    """A blocking message, or probe, that is in progress on a rank."""

    name: str
    """"receive" or "send"."""
    peer: int
    """A rank of the communicator, or MPI's constant for any rank."""
    tag: int
    number: int
    """How many messages of this direction the rank has begun."""


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank of a communicator. Times are in nanoseconds of the monotonic clock."""

    key: int
    """Identifies the communicator, the same in all its processes."""
    name: str
    rank: int
    size: int
    by_mpi: int
    """How many collective calls by MPI the rank has begun."""
    posts: int
    """How many other collective calls it has begun."""
    last: str
    """The last collective call; "" if there was none, or if its text is lost."""
    since_ns: int | None
    """When the last collective call began; None for a call by MPI."""
    on_gpu: bool
    """Whether the communicator has GPUs, so that its calls return when they are enqueued."""
    messages: tuple[BlockedMessage, ...] = ()
    last_post: str = ""
    """The last call that is not by MPI; "" if there was none, or if its text is lost."""
    completed: bytes = b""
    """How often the rank has named each rank in Complete, modulo 256; empty for a communicator."""

    @property
    def made(self) -> int:
        """How many collective calls the rank has begun."""
        return self.by_mpi + self.posts


class Step(NamedTuple):
    """A step of set-up or teardown, in which a process waits for others."""

    text: str
    since_ns: int
    world_ranks: tuple[int, ...]
    """The ranks of MPI.COMM_WORLD that make the step together; -1 for processes of other jobs."""


class Activity(NamedTuple):
    """The calls of a process in its communicators."""

    pid: int
    """The process number of the process that has made the page, in its own namespace."""
    world_rank: int
    """Its rank in MPI.COMM_WORLD; -1 if that is not known yet."""
    step: Step | None
    communicators: tuple[RankCalls, ...]


def read_activity(pid: int) -> Activity | None:
    """Return the activity of a process; None if it has no page. Local, and the process does not notice.

    Raises `PermissionError` for a process of another user, and `FileNotFoundError` if there is no such process. Raises
    `OtherVersionError` if another version of mpicomm has made the page.
    """
    with _page_of(pid) as memory:
        if memory is None:
            return None
        header = _words(memory, 0, layout.HEADER_WORDS)
        ranks, _, text = (_text(memory, header[layout.STEP]) or "").partition(" ")
        step = Step(printable(text), header[layout.STEP_SINCE], ranks_of_text(ranks)) if text else None
        names = _names(memory)
        calls = (_calls(memory, row, names) for row in _ROWS)
        communicators = tuple(found for found in calls if found is not None)
        return Activity(header[layout.PID], header[layout.WORLD_RANK], step, communicators)


def read_calls(pid: int, key: int) -> RankCalls | None:
    """Return the calls of a process in the communicator that ``key`` names; None if they cannot be read. Local."""
    with suppress(OSError, OtherVersionError), _page_of(pid) as memory:  # the process may be in another container
        if memory is not None:
            for row in _ROWS:
                if _words(memory, layout.row_at(row), 1)[layout.KEY] == key:
                    return _calls(memory, row, _names(memory))
    return None


@contextmanager
def _page_of(pid: int) -> Iterator[int | None]:
    """Open the page of a process as a descriptor; None if it has none. Raises as `read_activity`."""
    folder = Path(f"/proc/{pid}/fd")
    for name in os.listdir(folder):  # noqa: PTH208  # names, which become paths in the next line
        path = folder / name
        with suppress(FileNotFoundError):  # the process has closed the descriptor meanwhile
            if str(path.readlink()).startswith(_LINK):
                break
    else:
        yield None
        return
    # Meanwhile the descriptor may be of something else, for example of a pipe, whose opening would wait for a writer.
    memory = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(memory)
        is_page = stat.S_ISREG(status.st_mode) and status.st_size == layout.NBYTES
        if not is_page or _words(memory, 0, 1)[0] != layout.MAGIC:
            raise OtherVersionError
        yield memory
    finally:
        os.close(memory)


def _names(memory: int) -> list[str]:
    names = _bytes(memory, 0, layout.NAMES).split(b"\0")
    return [printable(name.decode(errors="backslashreplace")) for name in names]


def _calls(memory: int, row: int, names: Sequence[str]) -> RankCalls | None:
    at = layout.row_at(row)
    words = _words(memory, at, layout.WORDS)
    key, number = words[layout.KEY], words[layout.CALL]
    if key == 0 or not 0 <= words[layout.RANK] < words[layout.SIZE] <= _MAX_SIZE:
        return None
    name = printable(_string(memory, at, layout.NAME))
    if words[layout.NUMBER] > 1:
        name = f"{name} #{words[layout.NUMBER]}"
    logs = [_words(memory, layout.log_at(row, index), layout.LOG_WORDS) for index in range(layout.LOGS)]
    posts = sum(log[layout.POSTS] for log in logs)
    last_post = _last(memory, max(logs, key=lambda log: log[layout.SINCE]))
    last, since_ns = last_post, None
    if 0 < number <= layout.LOGS:
        last, since_ns = _last(memory, logs[number - 1]), logs[number - 1][layout.SINCE]
    elif number <= 0:
        last = names[-number] if -number < len(names) else ""
    if _words(memory, at, 1)[0] != key:  # the row belongs to another communicator meanwhile
        return None
    messages = (
        BlockedMessage("receive", words[layout.SOURCE], words[layout.TAG], words[layout.RECEIVES]),
        BlockedMessage("send", words[layout.DEST], words[layout.SEND_TAG], words[layout.SENDS]),
    )
    return RankCalls(
        *(key, name, words[layout.RANK], words[layout.SIZE], words[layout.CALLS_BY_MPI], posts, last, since_ns),
        bool(words[layout.ON_GPU]),
        tuple(each for each in messages if each.peer != layout.NOBODY),
        last_post,
        _bytes(memory, at, layout.COMPLETED) if words[layout.IS_WINDOW] else b"",
    )


def _last(memory: int, log: memoryview) -> str:
    """Return the last call of a log; "" if there was none, or if its text is gone."""
    call = log[layout.POSTS]
    text = layout.logged_call(log, call, partial(_text, memory)) if call > 0 else None
    return printable(text or "")


def _text(memory: int, number: int) -> str | None:
    """Return the text of that number; None if there is none, or if another text has overwritten it."""
    at = layout.TEXTS_AT + layout.text_at(number)
    text = _string(memory, at, slice(8, layout.TEXT_NBYTES))
    return text if number and _words(memory, at, 1)[0] == number else None


def _words(memory: int, at: int, count: int) -> memoryview:
    return memoryview(_bytes(memory, at, slice(8 * count))).cast("q")


def _string(memory: int, at: int, place: slice) -> str:
    return _bytes(memory, at, place).partition(b"\0")[0].decode(errors="backslashreplace")


def _bytes(memory: int, at: int, place: slice) -> bytes:
    start = place.start or 0
    nbytes = place.stop - start
    return os.pread(memory, nbytes, at + start).ljust(nbytes, b"\0")  # it is shorter if the process truncates it
