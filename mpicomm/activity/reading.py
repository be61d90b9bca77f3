"""Reads the calls of another process in its communicators from the page of that process. Imports no MPI.

Root may look at processes of anybody, who may have written anything into the page. So what is read is bounded, texts
are printable, and the page is read by pread: a mapping would end this process if the other one truncated the memory.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from mpicomm.activity import layout
from mpicomm.activity.ranks import ranks_of_text

_LINK = f"/memfd:{layout.MEMORY_NAME}"
_ROWS = range(layout.ROWS_AT, layout.TEXTS_AT, layout.ROW_NBYTES)
_LONGEST = 2000  # characters of a text for people
_MOST_RANKS = 1 << 24


class OtherVersionError(Exception):
    """The process has a page of another version of mpicomm."""


def printable(text: str) -> str:
    """Return a text of another process, shortened, as ASCII without the control characters that steer a terminal."""
    return "".join(char if " " <= char <= "~" else ascii(char)[1:-1] for char in text[:_LONGEST])


@dataclass(frozen=True)
class BlockedMessage:
    """A blocking message, or probe, that is in progress on a rank."""

    peer: int
    """A rank of the communicator, or MPI's constant for any rank."""
    tag: int
    number: int
    """How many messages of this direction the rank has begun."""


@dataclass(frozen=True)
class RankCalls:
    """The calls of one rank of a communicator. Times are in nanoseconds of the monotonic clock."""

    key: int
    """It names the communicator, the same in all its processes."""
    name: str
    rank: int
    size: int
    node_ranks: tuple[int, ...]
    """The ranks of the communicator on this rank's node."""
    made: int
    """How many collective calls the rank has begun."""
    last: str
    """The last collective call; "" if there was none, or if its text is lost."""
    since_ns: int | None
    """When the last collective call began; None for a call that MPI carries out."""
    on_gpu: bool
    """Whether the communicator has GPUs, so that its calls return when they are enqueued."""
    receive: BlockedMessage | None
    send: BlockedMessage | None
    by_mpi: int = 0
    """How many of the begun calls MPI carries out."""
    last_post: str = ""
    """The last call that MPI does not carry out; "" if there was none, or if its text is lost."""
    completed: bytes = b""
    """How often the rank has named each rank in Complete, modulo 256; empty for a communicator."""


@dataclass(frozen=True)
class Step:
    """A step of set-up or teardown, in which a process waits for others."""

    text: str
    since_ns: int
    world_ranks: tuple[int, ...]
    """The ranks of MPI.COMM_WORLD that make the step together; -1 for processes of other jobs."""


@dataclass(frozen=True)
class Activity:
    """The calls of a process in its communicators."""

    pid: int
    """The process number of the process that has made the page, in its own namespace."""
    world_rank: int
    """Its rank in MPI.COMM_WORLD; -1 if that is not known yet."""
    world_size: int
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
        header = _words(memory, 0, layout.STEP_SINCE + 1)
        calls = (_calls(memory, at) for at in _ROWS)
        return Activity(
            header[layout.PID],
            header[layout.WORLD_RANK],
            header[layout.WORLD_SIZE],
            _step(memory),
            tuple(found for found in calls if found is not None),
        )


def calls_of(pid: int, key: int) -> RankCalls | None:
    """Return the calls of a process in the communicator that ``key`` names; None if they cannot be read. Local."""
    with suppress(OSError, OtherVersionError), _page_of(pid) as memory:  # the process may be in another container
        at = next((at for at in _ROWS if _words(memory, at, 1)[layout.KEY] == key), None) if memory else None
        return None if memory is None or at is None else _calls(memory, at)
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


def _step(memory: int) -> Step | None:
    words = _words(memory, 0, layout.STEP_SINCE + 1)
    ranks, _, text = _posted(memory, words[layout.STEP] - 1).partition(" ") if words[layout.STEP] else ("", "", "")
    return Step(printable(text), words[layout.STEP_SINCE], ranks_of_text(ranks)) if text else None


def _calls(memory: int, at: int) -> RankCalls | None:
    words = _words(memory, at, layout.WORDS)
    key, number = words[layout.KEY], words[layout.CALL]
    if key == 0 or not 0 <= words[layout.RANK] < words[layout.SIZE] <= _MOST_RANKS:
        return None
    name, node_ranks = printable(_text(memory, at, layout.NAME)), _text(memory, at, layout.NODE_RANKS)
    if words[layout.IS_WINDOW]:
        node_ranks = ""  # there are counts
    if words[layout.NUMBER] > 1:
        name = f"{name} #{words[layout.NUMBER]}"
    last = _filled(memory, words, layout.CALL)
    if number <= 0:
        last = layout.BY_MPI[-number] if -number < len(layout.BY_MPI) else ""
    if _words(memory, at, 1)[0] != key:  # the row belongs to another communicator meanwhile
        return None
    receive = BlockedMessage(words[layout.SOURCE], words[layout.TAG], words[layout.RECEIVES])
    send = BlockedMessage(words[layout.DEST], words[layout.SEND_TAG], words[layout.SENDS])
    return RankCalls(
        key,
        name,
        words[layout.RANK],
        words[layout.SIZE],
        ranks_of_text(node_ranks),
        words[layout.CALLS_BY_MPI] + words[layout.POSTS],
        last,
        words[layout.SINCE] if number > 0 else None,
        bool(words[layout.ON_GPU]),
        None if receive.peer == layout.NOBODY else receive,
        None if send.peer == layout.NOBODY else send,
        words[layout.CALLS_BY_MPI],
        _filled(memory, words, layout.POST),
        _bytes(memory, at, layout.COMPLETED) if words[layout.IS_WINDOW] else b"",
    )


def call_by_mpi(pid: int, own: memoryview) -> str:
    """Return the name of a call by MPI that the process ``pid`` is in and this process is not, or "". Local.

    ``own`` has the words of this process in the communicator. The caller waits in another call, to which that process
    has not come. Ranks make the same calls in the same order, so that process is in another call, or has left it. A
    process that is only late has begun no more calls by MPI than this process.
    """
    calls = calls_of(pid, own[layout.KEY])
    if calls is None or calls.since_ns is not None or calls.by_mpi <= own[layout.CALLS_BY_MPI]:
        return ""
    return calls.last


def _filled(memory: int, words: memoryview, word: int) -> str:
    """Return the text and the numbers of a call, or "". A row holds the position of the text in ``word``."""
    if words[word] <= 0:
        return ""
    return printable(layout.filled(_posted(memory, words[word] - 1), words[layout.COUNT], words[layout.OFFSET]))


def _posted(memory: int, position: int) -> str:
    """Return the text of a call; "" if another text has overwritten it."""
    start = position % layout.TEXTS_NBYTES
    place = slice(start, min(start + layout.TEXTS_NBYTES // 8, layout.TEXTS_NBYTES))  # no text is longer
    text = _text(memory, layout.TEXTS_AT, place)
    written = _words(memory, 0, layout.TEXTS_END + 1)[layout.TEXTS_END]
    return text if written - position <= layout.TEXTS_NBYTES else ""


def _words(memory: int, at: int, count: int) -> memoryview:
    return memoryview(_bytes(memory, at, slice(8 * count))).cast("q")


def _text(memory: int, at: int, place: slice) -> str:
    return _bytes(memory, at, place).partition(b"\0")[0].decode(errors="backslashreplace")


def _bytes(memory: int, at: int, place: slice) -> bytes:
    start = place.start or 0
    nbytes = place.stop - start
    return os.pread(memory, nbytes, at + start).ljust(nbytes, b"\0")  # it is shorter if the process truncates it
