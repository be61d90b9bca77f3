"""Record: a call of this rank, and the record of the call that this thread is in."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

Category = Literal["collective", "message", "memory", "set-up", "wait"]


class Interval(Protocol):
    """A part of a stream's work, from one mark in the stream to another."""

    stream: int

    def extend(self) -> None:
        """Let the interval end behind the work that the stream has been given so far. Local, does not block."""

    def times_ns(self) -> tuple[int, int] | None:
        """Return when it began and ended, by the host's clock; None while it is not over. Local, does not block."""


# Not frozen: a record is filled while its call goes on.
@dataclass(slots=True, eq=False)
class Record:
    """A call of this rank. Times are of `clocks.now_ns`."""

    comm: str
    """The label of the communicator."""
    operation: str
    category: Category
    start_ns: int
    number: str = ""
    """The number of a collective call in its communicator, the same on all ranks; "" for all other calls."""
    nbytes: int | None = None
    """The bytes of the larger of this rank's buffers; None for calls without buffers."""
    dtype: str = ""
    details: dict[str, Any] = field(default_factory=dict)
    nested: bool = False
    """Whether it is part of another call that is recorded."""
    stop_ns: int = 0
    algorithm: str = ""
    why: str = ""
    slow_ways: list[str] = field(default_factory=list)
    error: str = ""
    captured: bool = False
    """Whether some of its work has become part of a CUDA graph, whose launches have no record."""
    intervals: list[Interval] = field(default_factory=list)
    """The work on devices, one interval for each stream."""
    ranges: int = 0
    """The NVTX ranges that are open."""


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[Record] = []


_calls = _Calls()


def open_records() -> list[Record]:
    """Return the records of the calls that this thread is in, the innermost last."""
    return _calls.open


def current() -> Record | None:
    """Return the record of the innermost call that this thread is in, None outside of recorded calls."""
    return _calls.open[-1] if _calls.open else None


def hear_of_slow_way(reason: str) -> None:
    """Note why the current call takes a slow way."""
    record = current()
    if record is not None and reason not in record.slow_ways:
        record.slow_ways.append(reason)
