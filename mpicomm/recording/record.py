"""Record: a call of this rank; the record of the call in which this thread is; this rank's clock.

The reader of traces has no MPI.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import StreamInterval

CLOCK = "mpicomm_clock"
"""The event with a reading of the rank's clock."""
DEVICE = "device"
"""The category of the work of calls on a device."""


Category = Literal["collective", "message", "memory", "set-up", "wait"]


# Not frozen, because a record is filled while its call goes on.
@dataclass(slots=True, eq=False)
class Record:
    """A call of this rank. Times are times of `now_ns`."""

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
    """Whether the call is part of another recorded call."""
    stop_ns: int = 0
    algorithm: str = ""
    why: str = ""
    slow_ways: list[str] = field(default_factory=list)
    error: str = ""
    captured: bool = False
    """Whether some work of the call has become part of a CUDA graph. Launches of a graph have no record."""
    intervals: list[StreamInterval] = field(default_factory=list)
    """The work on devices, one interval for each stream."""
    ranges: int = 0
    """The NVTX ranges that are open."""


@dataclass(frozen=True)
class Reading:
    """This rank's clock, compared with the clock of another rank."""

    reference: int
    """The number of the process that has the reference clock."""
    time_ns: int
    """The time of the measurement, by this rank's clock."""
    offset_ns: int
    """The nanoseconds by which this rank's clock is late: add them to its times."""
    uncertainty_ns: int


def now_ns() -> int:
    """Return the time of this rank's clock, the monotonic clock of the kernel."""
    return time.perf_counter_ns()


class _Calls(threading.local):
    def __init__(self) -> None:
        self.open: list[Record] = []


_calls = _Calls()


def open_records() -> list[Record]:
    """Return the records of the calls in which this thread is, the innermost last."""
    return _calls.open


def current() -> Record | None:
    """Return the record of the innermost call of this thread, None outside of recorded calls."""
    return _calls.open[-1] if _calls.open else None


def note_slow_way(reason: str) -> None:
    """Note why the current call takes a slow way."""
    record = current()
    if record is not None and reason not in record.slow_ways:
        record.slow_ways.append(reason)
