"""Reads the traces of ranks from files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomm.errors import InvalidUsageError
from mpicomm.recording.event_names import CLOCK

Event = dict[str, Any]


@dataclass(frozen=True)
class Trace:
    """The trace of one rank."""

    path: Path
    rank: int
    clocks: tuple[Event, ...]
    """The readings of the rank's clock, in order: the arguments of the events."""
    events: tuple[Event, ...]
    """All other events."""


def read_trace(path: Path) -> Trace:
    """Return the trace in a file. The last event may be cut off, because the process may have been killed.

    Raises `InvalidUsageError` for a file that cannot be read or has no trace of mpicomm.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidUsageError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    events: list[Event] = []
    for number, line in enumerate(lines):
        text = line.strip().strip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
        except ValueError:
            if number == len(lines) - 1 and events:
                break
            raise _no_trace(path) from None
        if not isinstance(event, dict) or not {"ph", "pid", "name"} <= event.keys():
            raise _no_trace(path)
        events.append(event)
    clocks = tuple(event["args"] for event in events if event["name"] == CLOCK)
    if not clocks:
        raise _no_trace(path)
    return Trace(path, clocks[0]["rank"], clocks, tuple(event for event in events if event["name"] != CLOCK))


def read_traces(paths: list[Path]) -> list[Trace]:
    """Return the traces of several ranks, by rank. Raises `InvalidUsageError`, also for two traces of one rank."""
    traces: dict[int, Trace] = {}
    for path in paths:
        trace = read_trace(path)
        if trace.rank in traces:
            raise InvalidUsageError(
                f"{traces[trace.rank].path} and {path} are both of rank {trace.rank}: name the files of one run"
            )
        traces[trace.rank] = trace
    return [traces[rank] for rank in sorted(traces)]


def _no_trace(path: Path) -> InvalidUsageError:
    return InvalidUsageError(
        f"{path} is no trace of one rank: name the files that a program has written with MPICOMM_TRACE=trace-%r.json"
    )
