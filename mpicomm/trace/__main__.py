"""``python -m mpicomm.trace merge trace-*.json -o all.json``: one trace of all ranks, and a table of their waits."""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from mpicomm.activity.reading import printable
from mpicomm.errors import InvalidUsageError, name_ranks
from mpicomm.recording.record import DEVICE
from mpicomm.sizes import rich_console, rich_table
from mpicomm.trace.merge import Clock, Event, Trace, Wait, clocks_of, find_waits, flows, read_traces


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
    traces = read_traces(paths)
    clocks = clocks_of(traces)
    events = aligned(traces, clocks)
    waits = list(find_waits(events, clocks))
    for wait in waits:
        wait.event["args"].update(waited_us=round(wait.waited_us, 3), waited_for=wait.late)
    merged = {"traceEvents": [*events, *flows(waits)], "displayTimeUnit": "ns"}
    try:
        output.write_text(json.dumps(merged), encoding="utf-8")
    except (OSError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InvalidUsageError(f"-o {output} cannot be written: {reason}: name another file") from None
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
    """Print the waits by pairs of ranks, the longest total first."""
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
        call = printable(f"{longest.operation} number {facts['number']} of communicator {facts['comm']}")
        times = f"{total_us / 1000:.3f}", f"{longest.waited_us / 1000:.3f}"
        table.add_row(str(rank), str(late), str(len(each)), *times, call)
    rich_console(sys.stdout, 140).print(table)


if __name__ == "__main__":
    sys.exit(main())
