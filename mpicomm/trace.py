"""``python -m mpicomm.trace merge trace-*.json -o all.json``: one trace of all ranks, by one clock.

It prints a table of the waits of ranks for the last rank that came to a call. It needs no MPI.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mpicomm.errors import InvalidUsageError, name_ranks
from mpicomm.recording.record import CLOCK, DEVICE
from mpicomm.sizes import rich_console, rich_table

Event = dict[str, Any]
_MIN_WAIT_US = 1.0  # shorter waits do not count, because ranks never come to a call at exactly the same time


class Trace(NamedTuple):
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
    no_trace = InvalidUsageError(
        f"{path} is no trace of one rank, or is damaged: name the files that a program has written with "
        "MPICOMM_TRACE=trace-%r.json, without the damaged ones"
    )
    texts = [text for line in lines if (text := line.strip().strip(",")) not in ("", "[", "]")]
    events: list[Event] = []
    for text in texts:
        try:
            event = json.loads(text)
        except ValueError:
            event = None
        if isinstance(event, dict):
            events.append(event)
        elif text is not texts[-1]:
            raise no_trace
    clocks = tuple(event["args"] for event in events if event.get("name") == CLOCK)
    if len({facts["rank"] for facts in clocks} | {event.get("pid") for event in events}) != 1 or not clocks:
        raise no_trace
    return Trace(path, clocks[0]["rank"], clocks, tuple(event for event in events if event["name"] != CLOCK))


class Clock(NamedTuple):
    """A clock that turns times of one rank into times of the common clock, all in nanoseconds."""

    points: tuple[tuple[float, float], ...]
    """Times of this rank, and the nanoseconds to add to them. Between two points the clock has drifted evenly."""
    uncertainty_ns: float = 0.0
    by_wall_clock: bool = False
    """Whether the rank has compared its clock with no other rank, so that its wall clock must serve."""

    def common_ns(self, time_ns: float) -> float:
        """Return the time of the common clock."""
        times, offsets = zip(*self.points, strict=True)
        return time_ns + float(np.interp(float(time_ns), times, offsets))


def clocks_of(traces: Sequence[Trace]) -> dict[int, Clock]:
    """Return the clock of each rank. The common clock is the clock with which most ranks have compared their own.

    A rank may have compared its clock only with another rank, and then follows that rank. If no chain of such readings
    leads to the common clock, the wall clocks of the two ranks serve.
    """
    references = Counter(reading["reference"] for trace in traces for reading in trace.clocks)
    common = min(references, key=lambda rank: (-references[rank], rank))
    clocks: dict[int, Clock] = {common: Clock(((0.0, 0.0),))}

    def known(trace: Trace) -> list[dict[str, Any]]:
        return [reading for reading in trace.clocks if reading["reference"] in clocks]

    others = [trace for trace in traces if trace.rank != common]
    while ready := next((trace for trace in others if known(trace)), None):
        others.remove(ready)
        points: dict[float, float] = {}
        for reading in known(ready):
            own_ns, reference = reading["time_ns"], clocks[reading["reference"]]
            points[float(own_ns)] = reference.common_ns(own_ns + reading["offset_ns"]) - own_ns
        uncertainty_ns = max(
            reading["uncertainty_ns"] + clocks[reading["reference"]].uncertainty_ns for reading in known(ready)
        )
        clocks[ready.rank] = Clock(tuple(sorted(points.items())), uncertainty_ns)
    base = next((trace for trace in traces if trace.rank == common), traces[0])
    for trace in others:
        own_ns, base_ns = (each.clocks[0]["wall_ns"] - each.clocks[0]["time_ns"] for each in (trace, base))
        clocks[trace.rank] = Clock(((0.0, float(own_ns - base_ns)),), by_wall_clock=True)
    return clocks


class Wait(NamedTuple):
    """The time that ``rank`` waited in a collective call for ``late``, the last rank to come to it."""

    operation: str
    rank: int
    late: int
    waited_us: float
    event: Event
    """The part of the call in which the waiting rank waited longest."""
    late_event: Event
    """The part of the call with which the last rank came."""


def find_waits(events: Iterable[Event], clocks: Mapping[int, Clock]) -> Iterator[Wait]:
    """Yield the waits in events of all ranks, with times of the common clock.

    A call has several events on a rank: the call, the waits for its request, and its work on a device. A rank comes to
    the call when the first of these events begins. It waits while one of them goes on before the last rank comes. If
    the work of all ranks was measured on devices, the events on the host do not count, because the host only enqueued
    the work. The waits leave out times below the uncertainty of the clocks.
    """
    for parts in _calls(events).values():
        if len(parts) < 2:
            continue
        arrivals = {rank: min(events, key=lambda event: float(event["ts"])) for rank, events in parts.items()}
        late = max(arrivals, key=lambda rank: (arrivals[rank]["ts"], rank))
        last_us = float(arrivals[late]["ts"])
        for rank, events_of_rank in parts.items():
            waits = [(max(0.0, min(_end(event), last_us) - event["ts"]), event) for event in events_of_rank]
            waited_us = sum(us for us, _ in waits)
            uncertain_us = (clocks[rank].uncertainty_ns + clocks[late].uncertainty_ns) / 1000
            if rank != late and waited_us > max(_MIN_WAIT_US, uncertain_us):
                _, longest = max(waits, key=lambda wait: wait[0])
                operation = arrivals[rank]["name"]
                yield Wait(operation, rank, late, waited_us, longest, arrivals[late])


def flows(waits: Sequence[Wait]) -> Iterator[Event]:
    """Yield the events that draw an arrow from the call of the last rank to each call that waited for it."""
    for number, wait in enumerate(waits):
        arrow = {"name": f"waited for rank {wait.late}", "cat": "waits", "id": number}
        begin = float(wait.late_event["ts"])
        yield {**arrow, "ph": "s", "ts": begin, "pid": wait.late, "tid": wait.late_event["tid"]}
        end = min(max(begin, float(wait.event["ts"])), _end(wait.event))
        yield {**arrow, "ph": "f", "bp": "e", "ts": end, "pid": wait.rank, "tid": wait.event["tid"]}


def _calls(events: Iterable[Event]) -> dict[tuple[str, str], dict[int, list[Event]]]:
    calls: dict[tuple[str, str], dict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    for event in events:
        facts = event.get("args", {})
        if event["ph"] == "X" and "number" in facts:
            calls[facts["comm"], facts["number"]][event["pid"]].append(event)
    for parts in calls.values():
        on_device = {rank: [each for each in events if each["cat"] == DEVICE] for rank, events in parts.items()}
        if all(on_device.values()):
            parts.update(on_device)
    return calls


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m mpicomm.trace", description="Works on traces of MPICOMM_TRACE.")
    commands = parser.add_subparsers(dest="command", required=True)
    merge = commands.add_parser(
        "merge", help="write one trace of all ranks, by one clock, and print which rank waited for which rank"
    )
    merge.add_argument("files", nargs="+", type=Path, help="the traces of the ranks, as trace-0.json trace-1.json")
    merge.add_argument("-o", "--output", required=True, type=Path, help="the file to write")
    options = parser.parse_args(arguments)
    try:
        _merge(options.files, options.output)
    except InvalidUsageError as error:
        parser.exit(2, f"{parser.prog} merge: {error}\n")
    return 0


def _merge(paths: list[Path], output: Path) -> None:
    if output in paths:
        raise InvalidUsageError(f"-o {output} is one of the traces: name another file")
    by_rank: dict[int, Trace] = {}
    for path in paths:
        trace = read_trace(path)
        if trace.rank in by_rank:
            both = f"{by_rank[trace.rank].path} and {path} are both of rank {trace.rank}"
            raise InvalidUsageError(f"{both}: name the files of one run")
        by_rank[trace.rank] = trace
    traces = [by_rank[rank] for rank in sorted(by_rank)]
    clocks = clocks_of(traces)
    events = aligned(traces, clocks)
    waits = list(find_waits(events, clocks))
    for wait in waits:
        wait.event["args"].update(waited_us=round(wait.waited_us, 3), waited_for=wait.late)
    merged = {"traceEvents": [*events, *flows(waits)], "displayTimeUnit": "ns"}
    try:
        output.write_text(json.dumps(merged), encoding="utf-8")
    except OSError as error:
        raise InvalidUsageError(f"-o {output} cannot be written: {error.strerror}: name another file") from None
    count = sum(event["ph"] == "X" and event["cat"] != DEVICE for event in events)
    said = f"{output}: {count} calls of {name_ranks([trace.rank for trace in traces])}; open it in ui.perfetto.dev\n"
    sys.stdout.write(said)
    by_wall_clock = [rank for rank, clock in clocks.items() if clock.by_wall_clock]
    if by_wall_clock:
        sys.stdout.write(f"{name_ranks(by_wall_clock)}: aligned by the wall clock, which may be off by milliseconds\n")
    _print(waits)


def aligned(traces: Sequence[Trace], clocks: dict[int, Clock]) -> list[Event]:
    """Return the events of all ranks with times of the common clock, in microseconds from the first event on."""
    events: list[Event] = []
    for trace in traces:
        clock = clocks[trace.rank]
        for event in trace.events:
            if "ts" not in event:
                events.append(event)
                continue
            begin_ns = event["ts"] * 1000
            common_ns = clock.common_ns(begin_ns)
            length_ns = clock.common_ns(begin_ns + event.get("dur", 0.0) * 1000) - common_ns
            events.append({**event, "ts": common_ns / 1000, "dur": length_ns / 1000})
    first_us = min((event["ts"] for event in events if "ts" in event), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first_us, 3)
            event["dur"] = round(event["dur"], 3)
    return events


def _print(waits: Sequence[Wait]) -> None:
    if not waits:
        sys.stdout.write("no rank waited for another rank in a collective call\n")
        return
    numbers = "rank", "waited for rank", "calls", "total ms", "longest ms"
    table = rich_table("who waited for whom in collective calls", (*numbers, "in"), right=numbers)
    pairs: dict[tuple[int, int], list[Wait]] = defaultdict(list)
    for wait in waits:
        pairs[wait.rank, wait.late].append(wait)
    rows = [(sum(wait.waited_us for wait in each), pair, each) for pair, each in pairs.items()]
    for total_us, (rank, late), each in sorted(rows, key=lambda row: -row[0]):
        longest = max(each, key=lambda wait: wait.waited_us)
        facts = longest.event["args"]
        call = f"{longest.operation} number {facts['number']} of communicator {facts['comm']}"
        times = f"{total_us / 1000:.3f}", f"{longest.waited_us / 1000:.3f}"
        table.add_row(str(rank), str(late), str(len(each)), *times, call)
    rich_console(sys.stdout, 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
