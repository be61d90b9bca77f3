"""TraceFile: the trace of one rank in the JSON array format of Chrome's Trace Event Format, one event in each line.

Perfetto and chrome://tracing read such a file even if its end is missing, as after a crash.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mpicomm.log import logger, open_file
from mpicomm.recording.clocks import Reading, now_ns
from mpicomm.recording.record import CLOCK, DEVICE, Record

_FIRST_DEVICE_TRACK = 1000
_MOST_KEPT = 2048
_LONGEST_KEPT_NS = 1_000_000_000


class TraceFile:
    """The file ``path``, which it replaces, for the calls of the process with that `process_number`.

    Raises `InvalidUsageError` if the file cannot be opened. If it cannot be written later, as on a full disk, the trace
    ends there with a warning. Its methods are for any thread.
    """

    def __init__(self, path: str, rank: int) -> None:
        self.path = path
        self._rank = rank
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._written_ns = now_ns()
        self._threads: dict[int, int] = {}
        self._streams: dict[tuple[int, int], int] = {}
        self._file = open_file("MPICOMM_TRACE", path, "w")
        self._separator = "["
        self._name("process_name", 0, f"rank {rank} ({socket.gethostname()}:{os.getpid()})")
        self._add({"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}})
        self.flush()

    def identity(self) -> tuple[str, int, int] | None:
        """Return a value that is the same for the same file of a machine; None for devices such as /dev/null."""
        path = Path(self.path)
        status = path.stat()
        return (socket.gethostname(), status.st_dev, status.st_ino) if path.is_file() else None

    def add_clock(self, reading: Reading) -> None:
        """Write a reading of this rank's clock."""
        facts = {
            "rank": self._rank,
            "host": socket.gethostname(),
            "wall_ns": time.time_ns() - now_ns() + reading.time_ns,
            **asdict(reading),
        }
        self._add({"ph": "M", "name": CLOCK, "pid": self._rank, "tid": 0, "args": facts})

    def add_call(self, record: Record) -> None:
        """Write the time of a call on the host, in the track of the calling thread."""
        self._add(self._slice(record, self._thread(), record.start_ns, record.stop_ns, record.category))

    def add_device_time(self, record: Record, ordinal: int, stream: int, start_ns: int, stop_ns: int) -> None:
        """Write the time of a call on a device, in the track of its stream."""
        track = self._streams.get((ordinal, stream))
        if track is None:
            track = self._streams[ordinal, stream] = _FIRST_DEVICE_TRACK + len(self._streams)
            self._name("thread_name", track, f"GPU {ordinal}, " + (f"stream {stream:#x}" if stream else "stream 0"))
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
            "comm": record.comm,
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

    def _thread(self) -> int:
        ident = threading.get_ident()
        track = self._threads.get(ident)
        if track is None:
            track = self._threads[ident] = len(self._threads)
            name = "host calls" if track == 0 else f"host calls, thread {threading.current_thread().name}"
            self._name("thread_name", track, name)
        return track

    def _name(self, what: str, track: int, name: str) -> None:
        self._add({"ph": "M", "name": what, "pid": self._rank, "tid": track, "args": {"name": name}})

    def _add(self, event: dict[str, Any]) -> None:
        line = json.dumps(event)
        with self._lock:
            self._lines.append(line)
            late = len(self._lines) >= _MOST_KEPT or now_ns() - self._written_ns > _LONGEST_KEPT_NS
        if late:
            self.flush()
