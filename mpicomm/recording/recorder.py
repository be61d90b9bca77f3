"""Recorder: it writes the records of this process to its trace file and as NVTX ranges, and counts them."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

from mpicomm import environment, log
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.recording.record import Record, note_slow_way
from mpicomm.recording.statistics import Counts
from mpicomm.recording.trace_file import TraceFile
from mpicomm.sizes import rich_console

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import StreamInterval

_DOMAIN = "mpicomm"
NVTX = "nvtx"
"""The value of MPICOMM_TRACE that asks for only NVTX ranges."""


class Recorder:
    """The records of the process with that number, for all its communicators that have these settings.

    ``reports`` says whether this process prints the table of MPICOMM_STATS. The recorder ends with the process. Raises
    `InvalidUsageError` if the file cannot be written.
    """

    def __init__(self, settings: environment.Recording, number: int, *, reports: bool) -> None:
        self.settings = settings
        self._total = Counts()  # of all communicators
        self._reports = reports and settings.stats
        self._process = os.getpid()
        self._pending: deque[tuple[Record, StreamInterval, int, Counts]] = deque()
        self._nvtx: Any = None if settings.trace is None else _nvtx(required=settings.trace == NVTX)
        self.file: TraceFile | None = None
        if settings.trace is not None and settings.trace != NVTX:
            self.file = TraceFile(log.file_name(settings.trace, number), number)
        if note_slow_way not in log.slow_way_listeners:
            log.slow_way_listeners.append(note_slow_way)
        atexit.register(self._finish)

    def open_range(self, record: Record, text: str) -> None:
        """Open an NVTX range of a call, if the package nvtx is there."""
        if self._nvtx is not None:
            self._nvtx.push_range(message=text, domain=_DOMAIN)
            record.ranges += 1

    def close_ranges(self, record: Record) -> None:
        """Close the ranges of a call. A call by MPI gets a mark, because MPI names its algorithm only at the end."""
        if record.ranges == 1 and record.algorithm:
            self._nvtx.mark(message=f"{record.operation} by {record.algorithm}", domain=_DOMAIN)
        while record.ranges:
            self._nvtx.pop_range(domain=_DOMAIN)
            record.ranges -= 1

    def add(self, record: Record, ordinal: int, counts: Counts) -> None:
        """Take the record of a call that is over on the host; ``ordinal`` is the device of its streams."""
        if not record.nested:
            counts.add(record)
            self._total.add(record)
        if self.file is not None:
            self.file.add_call(record)
        self._pending.extend((record, interval, ordinal, counts) for interval in record.intervals)
        self.drain()

    def drain(self) -> None:
        """Take the device times of all calls that are over on the device, in order. Local, does not block."""
        while self._pending:
            try:
                pending = record, interval, ordinal, counts = self._pending.popleft()
            except IndexError:  # another thread has taken the last record
                return
            try:
                times = interval.times_ns()
            except MpicommError:  # the device has failed, and the calls of the program report it
                continue
            if times is None:
                self._pending.appendleft(pending)
                return
            # The first interval is on the call's stream, which waits for the work on other streams.
            if not record.nested and interval is record.intervals[0]:
                for each in (counts, self._total):
                    each.add_device_time(record, times[1] - times[0])
            if self.file is not None:
                self.file.add_device_time(record, ordinal, interval.stream, *times)

    def flush(self) -> None:
        """Take all known device times, and write all events to the file."""
        self.drain()
        if self.file is not None:
            self.file.flush()

    def discard(self) -> None:
        """Give up the recorder, because another rank has the same file."""
        atexit.unregister(self._finish)
        if self.file is not None:
            self.file.close()

    def _finish(self) -> None:
        """Write the rest before the process ends. In a forked child everything belongs to the parent."""
        if os.getpid() != self._process:
            return
        self.flush()
        if self.file is not None:
            self.file.close()
        if self._reports:
            self._total.statistics().print(rich_console(sys.stderr, 140))  # stdout stays the program's


def _nvtx(*, required: bool) -> Any:
    """Return the package nvtx; None without it, or `InvalidUsageError` if it is ``required``."""
    try:
        return importlib.import_module("nvtx")
    except ImportError as error:
        if not required:
            return None
        raise InvalidUsageError(
            f'MPICOMM_TRACE="nvtx" needs the package nvtx: pip install -e ".[nvtx]", or name a file ({error})'
        ) from error
