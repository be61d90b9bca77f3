"""Steps: the work that one rank enqueues for a collective on GPUs. AnyPlan: a call of steps. They know no device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from mpicomm.kernels.variant import Launch


@dataclass(frozen=True)
class Copy:
    """A copy by a copy engine into a peer's memory. It runs beside the kernels.

    A ``local`` copy stays within this rank's memory and runs in order with the kernels. With several ``rows``,
    ``nbytes`` are those of a row, and the pitches are the bytes from one row to the next.
    """

    target: int
    source: int
    nbytes: int
    local: bool = False
    rows: int = 1
    target_pitch: int = 0
    source_pitch: int = 0


@dataclass(frozen=True)
class Fork:
    """All copies after it wait for all steps before it."""


@dataclass(frozen=True)
class Join:
    """All steps after it, except copies, wait for all copies before it."""


@dataclass(frozen=True)
class LibraryWork:
    """Work of another library, in order with the kernels. ``enqueue`` gets the stream."""

    enqueue: Callable[[int], object]


Step = Launch | Copy | Fork | Join | LibraryWork


class AlgorithmChoice(NamedTuple):
    """The algorithm of a call, as text for records of calls."""

    algorithm: str = ""
    why: str = ""
    slow: str = ""
    """Why the call takes a slow way; "" if it does not."""


NO_CHOICE = AlgorithmChoice()
"""The choice of plans that are parts of calls."""


class AnyPlan:
    """A call that an engine can enqueue repeatedly. Its ``str`` is `text`."""

    words: str
    count = 0
    offset: int | None = None
    """The text and the numbers of the call, for `CallLog.post`."""
    choice: AlgorithmChoice = NO_CHOICE
    collective = True
    """Whether all ranks make the call. Then they can compare their calls."""
    lasts = True
    """Whether it stays the plan of one call. A template is the plan of another call after the next `fill`."""
    by_output = False
    """Whether the library of the receive buffer decides the stream, because MPI ignores the send buffer."""
    by_address = False
    """Whether an address names a buffer. The caller's later work on the buffer may be on any stream."""

    @property
    def text(self) -> str:
        """The text of the call, for errors."""
        return self.words

    def __str__(self) -> str:
        return self.text
