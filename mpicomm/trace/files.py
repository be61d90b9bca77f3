"""Reads the traces of ranks from files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomm.errors import InvalidUsageError
from mpicomm.recording.event_names import CLOCK

Event = dict[str, Any]
_LARGEST = 1e30  # of a number: some way below the largest float


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
    for number, line in enumerate(lines, 1):
        text = line.strip().strip(",")
        if text in ("", "[", "]"):
            continue
        try:
            event = json.loads(text)
        except (ValueError, RecursionError):
            if number == len(lines) and events:
                break
            raise _no_trace(path, number) from None
        if not _is_event(event):
            raise _no_trace(path, number)
        events.append(event)
    clocks = tuple(event["args"] for event in events if event["name"] == CLOCK)
    if len({facts["rank"] for facts in clocks} | {event["pid"] for event in events}) != 1 or not clocks:
        raise _no_trace(path, len(lines))
    return Trace(path, clocks[0]["rank"], clocks, tuple(event for event in events if event["name"] != CLOCK))


def _is_event(event: Any) -> bool:
    """Return whether an event has all facts that the merge reads. The file may be damaged, or of another program."""
    if not isinstance(event, dict):
        return False
    args = event.get("args", {})
    if not isinstance(args, dict) or not isinstance(event.get("name"), str):
        return False
    texts, numbers = [event.get("ph")], [event.get("pid"), *(event[name] for name in ("ts", "dur") if name in event)]
    if event["name"] == CLOCK:
        numbers += map(args.get, ("rank", "reference", "time_ns", "offset_ns", "uncertainty_ns", "wall_ns"))
    if event.get("ph") == "X":
        numbers += map(event.get, ("ts", "dur", "tid"))
        texts += [event.get("cat"), *([args["number"], args.get("comm")] if "number" in args else [])]
    if not all(isinstance(text, str) for text in texts):
        return False
    return all(isinstance(number, int | float) and abs(number) < _LARGEST for number in numbers)  # no NaN either


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


def _no_trace(path: Path, line: int) -> InvalidUsageError:
    return InvalidUsageError(
        f"{path} is no trace of one rank, or is damaged (line {line}): name the files that a program has written with "
        "MPICOMM_TRACE=trace-%r.json, without the damaged ones"
    )
