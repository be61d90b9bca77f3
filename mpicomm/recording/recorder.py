"""The outputs of records: the trace file of this process, NVTX ranges, and counts.

A trace file has the JSON array format of Chrome's Trace Event Format, one event in each line. Perfetto and
chrome://tracing read such a file even if its end is missing, as after a crash.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpicomm import environment, log
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.log import logger, open_file
from mpicomm.recording.record import CLOCK, DEVICE, ClockReading, Counts, Record, add_slow_path, now_ns
from mpicomm.sizes import rich_console

if TYPE_CHECKING:
    from mpicomm.devices.cuda.timeline import StreamInterval

_FIRST_DEVICE_TRACK = 1000
_MAX_BUFFERED = 2048
_MAX_BUFFERED_NS = 1_000_000_000


class TraceFile:
    """The trace of one process in the file ``path``, which it overwrites. ``rank`` is the `process_number`.

    Raises `InvalidUsageError` if the file cannot be opened. If it cannot be written later, as on a full disk, the trace
    ends there with a warning. Its methods are for any thread.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._written_ns = now_ns()
        self._threads: dict[Any, int] = {}
        self._streams: dict[Any, int] = {}
        self._file = open_file("MPICOMM_TRACE", path, "w")
        self._separator = "["
        self._describe("process_name", name=f"rank {rank} ({socket.gethostname()}:{os.getpid()})")
        self._describe("process_sort_index", sort_index=rank)
        self.flush()

    def add_clock(self, reading: ClockReading) -> None:
        """Write a reading of this rank's clock."""
        wall_ns = time.time_ns() - now_ns() + reading["time_ns"]
        self._describe(CLOCK, rank=self._rank, host=socket.gethostname(), wall_ns=wall_ns, **reading)

    def add_call(self, record: Record) -> None:
        """Write the time of a call on the host, in the track of the calling thread."""
        thread = threading.current_thread()
        track = self._track(self._threads, thread.ident, 0, f"host calls, thread {thread.name}")
        self._add(self._slice(record, track, record.start_ns, record.stop_ns, record.category))

    def add_device_time(self, record: Record, stream: int, start_ns: int, stop_ns: int) -> None:
        """Write the time of a call on a device, in the track of its stream."""
        ordinal = record.tracer.ordinal
        name = f"GPU {ordinal}, stream {stream:#x}"
        track = self._track(self._streams, (ordinal, stream), _FIRST_DEVICE_TRACK, name)
        self._add(self._slice(record, track, start_ns, stop_ns, DEVICE))

    def flush(self) -> None:
        """Write all events that are still in memory."""
        with self._lock:
            lines, self._lines = self._lines, []
            if lines:
                self._write(self._separator + "\n" + ",\n".join(lines))
                self._separator = ","
            self._written_ns = now_ns()

    def close(self) -> None:
        """Write all events that are still in memory, and the end of the file. A second call does nothing."""
        self.flush()
        with self._lock:
            self._write("\n]\n")
            self._file.close()

    def _write(self, text: str) -> None:
        if self._file.closed:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):  # it tries to write the rest again, and closes the file in any case
                self._file.close()
            logger.warning("MPICOMM_TRACE=%r cannot be written: %s: the trace ends here", self.path, error.strerror)

    def _slice(self, record: Record, track: int, start_ns: int, stop_ns: int, category: str) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "bytes": record.nbytes,
            "dtype": record.dtype or None,
            "algorithm": record.algorithm or None,
            "why": record.why or None,
            "slow": "; ".join(record.slow_ways) or None,
            "comm": record.tracer.label,
            "number": record.number or None,
            "captured": record.captured or None,
            "error": record.error or None,
        }
        return {
            "ph": "X",
            "name": record.operation,
            "cat": category,
            "ts": start_ns / 1000,
            "dur": (stop_ns - start_ns) / 1000,
            "pid": self._rank,
            "tid": track,
            "args": {**{name: value for name, value in facts.items() if value is not None}, **record.details},
        }

    def _track(self, tracks: dict[Any, int], key: Any, first: int, name: str) -> int:
        if key not in tracks:
            tracks[key] = first + len(tracks)
            self._describe("thread_name", tracks[key], name=name)
        return tracks[key]

    def _describe(self, what: str, track: int = 0, **facts: Any) -> None:
        self._add({"ph": "M", "name": what, "pid": self._rank, "tid": track, "args": facts})

    def _add(self, event: dict[str, Any]) -> None:
        line = json.dumps(event)
        with self._lock:
            self._lines.append(line)
            late = len(self._lines) >= _MAX_BUFFERED or now_ns() - self._written_ns > _MAX_BUFFERED_NS
        if late:
            self.flush()


_DOMAIN = "mpicomm"
NVTX = "nvtx"
"""The value of MPICOMM_TRACE that asks for only NVTX ranges."""


class Recorder:
    """The outputs of this process, for all communicators with these ``settings``: trace file, NVTX ranges, counts.

    ``number`` is the `process_number`. ``reports`` says whether this process prints the table of MPICOMM_STATS. The
    recorder ends with the process. Raises `InvalidUsageError` if the file cannot be written.
    """

    def __init__(self, settings: environment.Recording, number: int, *, reports: bool) -> None:
        self._total = Counts()  # of all communicators
        self._reports = reports and settings.stats
        self._process = os.getpid()
        self._pending: deque[tuple[Record, StreamInterval]] = deque()
        self._nvtx: Any = None
        if settings.trace is not None:
            try:
                self._nvtx = importlib.import_module("nvtx")
            except ImportError as error:
                if settings.trace == NVTX:
                    way_out = 'pip install -e ".[nvtx]", or name a file'
                    text = f'MPICOMM_TRACE="nvtx" needs the package nvtx: {way_out} ({error})'
                    raise InvalidUsageError(text) from error
        self.file: TraceFile | None = None
        if settings.trace is not None and settings.trace != NVTX:
            self.file = TraceFile(log.file_name(_of_one_rank(settings.trace), number), number)
        if add_slow_path not in log.slow_path_listeners:
            log.slow_path_listeners.append(add_slow_path)
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

    def add(self, record: Record) -> None:
        """Add the record of a call that is over on the host."""
        if not record.nested:
            record.tracer.counts.add(record)
            self._total.add(record)
        if self.file is not None:
            self.file.add_call(record)
        self._pending.extend((record, interval) for interval in record.intervals)
        self.drain()

    def drain(self) -> None:
        """Add the device times of all calls that are over on the device, in order. Local, does not block."""
        while self._pending:
            try:
                pending = record, interval = self._pending.popleft()
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
                for each in (record.tracer.counts, self._total):
                    each.add_device_time(record, times[1] - times[0])
            if self.file is not None:
                self.file.add_device_time(record, interval.stream, *times)

    def flush(self) -> None:
        """Add all known device times, and write all events to the file."""
        self.drain()
        if self.file is not None:
            self.file.flush()

    def _finish(self) -> None:
        """Write the rest before the process ends. In a forked child everything belongs to the parent."""
        if os.getpid() != self._process:
            return
        self.flush()
        if self.file is not None:
            self.file.close()
        if self._reports:
            self._total.statistics().print(rich_console(sys.stderr, 140))  # stdout stays the program's


def _of_one_rank(pattern: str) -> str:
    """Return the name of a trace with a mark for the rank, except for a device such as /dev/null."""
    path = Path(pattern)
    if "%r" in pattern or (path.exists() and not path.is_file()):
        return pattern
    return str(path.with_name(f"{path.stem}-%r{path.suffix}"))
