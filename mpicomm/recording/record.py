"""The record of a call, the open records of this thread, this rank's clock, and counts of calls.

The reader of traces has no MPI.
"""

from __future__ import annotations

import bisect
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from mpicomm.sizes import format_size, rich_table

if TYPE_CHECKING:
    from rich.console import Console

    from mpicomm.devices.cuda.timeline import StreamInterval
    from mpicomm.recording.tracer import Tracer

CLOCK = "mpicomm_clock"
"""The event with a `ClockReading` of the rank's clock."""
DEVICE = "device"
"""The category of the work of calls on a device."""


Category = Literal["collective", "message", "memory", "set-up", "wait"]


# Not frozen, because a record is filled while its call goes on.
@dataclass(slots=True, eq=False)
class Record:
    """A call of this rank. Times are times of `now_ns`."""

    tracer: Tracer
    """The tracer of the communicator."""
    operation: str
    category: Category
    start_ns: int = 0
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


ClockReading = dict[str, int]
"""This rank's clock, compared with the clock of the process with the number ``reference``.

At ``time_ns`` of this rank's clock it is late by ``offset_ns``, give or take ``uncertainty_ns``.
"""


def now_ns() -> int:
    """Return the time of this rank's clock, the monotonic clock of the kernel."""
    return time.perf_counter_ns()


class _OpenCalls(threading.local):
    def __init__(self) -> None:
        self.records: list[Record] = []


open_calls = _OpenCalls()
"""The records of the calls in which this thread is, the innermost last."""


def current() -> Record | None:
    """Return the record of the innermost call of this thread, None outside of recorded calls."""
    return open_calls.records[-1] if open_calls.records else None


def add_slow_path(reason: str) -> None:
    """Add the reason why the current call takes a slow path."""
    record = current()
    if record is not None and reason not in record.slow_ways:
        record.slow_ways.append(reason)


_BOUNDS = tuple(1 << bits for bits in (8, 12, 16, 20, 24, 28))
_SIZE_CLASSES = (*(f"<= {format_size(bound)}" for bound in _BOUNDS), f"> {format_size(_BOUNDS[-1])}")


@dataclass
class CallStatistics:
    """The calls of one operation, size class, algorithm and error on this rank."""

    operation: str
    sizes: str
    """The size class, as in "<= 4K" or "> 256M"; "" for calls without buffers."""
    algorithm: str
    calls: int = 0
    nbytes: int = 0
    """The bytes of all calls; each call counts the larger of this rank's buffers."""
    host_s: float = 0.0
    """The time in seconds that the calls took on the host."""
    device_s: float = 0.0
    """The seconds between begin and end of each call in its stream, with the waits for other ranks."""
    longest_s: float = 0.0
    """The longest time in seconds that a call took on the host."""
    error: str = ""
    """The class of the error that the calls have raised; "" for calls that have returned."""


@dataclass(frozen=True)
class Statistics:
    """The calls of a communicator on this rank; ``print`` shows a table."""

    rows: tuple[CallStatistics, ...]
    slow_ways: dict[tuple[str, str], int]
    """The number of calls that took a slow path, by operation and reason."""

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=140, color_system=None)
        with console.capture() as capture:
            self.print(console)
        return capture.get()

    def print(self, console: Console) -> None:
        """Print the table on a console of rich."""
        numbers = "calls", "total bytes", "host ms", "device ms", "mean us", "longest us"
        columns = "operation", "bytes", "algorithm", *numbers
        table = rich_table("mpicomm: calls of this rank", columns, right=numbers)
        for row in sorted(self.rows, key=lambda row: -(row.host_s + row.device_s)):
            mean_us = f"{row.host_s / row.calls * 1e6:.1f}" if row.calls else ""
            table.add_row(
                row.operation,
                row.sizes,
                ", ".join(filter(None, (row.algorithm, row.error and f"failed: {row.error}"))),
                str(row.calls),
                f"{row.nbytes:,}",
                f"{row.host_s * 1e3:.3f}",
                f"{row.device_s * 1e3:.3f}" if row.device_s else "",
                mean_us,
                f"{row.longest_s * 1e6:.1f}",
            )
        console.print(table)
        if self.slow_ways:
            rows = [(operation, str(calls), why) for (operation, why), calls in sorted(self.slow_ways.items())]
            console.print(rich_table("mpicomm: slow paths taken", ("operation", "calls", "why"), rows, right=["calls"]))


class Counts:
    """Counts records of calls; for any thread."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str, str], CallStatistics] = {}
        self._slow_ways: Counter[tuple[str, str]] = Counter()

    def add(self, record: Record) -> None:
        """Count a call that has ended on the host."""
        row, lasted_s = self._row(record), (record.stop_ns - record.start_ns) / 1e9
        row.calls += 1
        row.nbytes += record.nbytes or 0
        row.host_s += lasted_s
        row.longest_s = max(row.longest_s, lasted_s)
        for reason in record.slow_ways:
            self._slow_ways[record.operation, reason] += 1

    def add_device_time(self, record: Record, lasted_ns: int) -> None:
        """Add the time of a call on a device."""
        self._row(record).device_s += lasted_ns / 1e9

    def statistics(self) -> Statistics:
        """Return the counts so far."""
        return Statistics(tuple(map(replace, self._rows.copy().values())), dict(self._slow_ways))

    def _row(self, record: Record) -> CallStatistics:
        sizes = "" if record.nbytes is None else _SIZE_CLASSES[bisect.bisect_left(_BOUNDS, record.nbytes)]
        key = record.operation, sizes, record.algorithm, record.error
        row = self._rows.get(key)
        if row is None:
            row = self._rows.setdefault(key, CallStatistics(*key[:3], error=record.error))
        return row
