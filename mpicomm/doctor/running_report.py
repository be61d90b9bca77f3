"""Looks at running jobs, and reports to people and in JSON which ranks wait for which ranks."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence

from mpicomm.doctor.running import Job
from mpicomm.doctor.waits import Line, Look, RankWait

_GLANCE_S = 0.3  # long enough to see whether a process is busy


def watch(find: Callable[[], Sequence[Job]], longest_s: float) -> list[Look]:
    """Look at jobs twice, ``longest_s`` seconds apart if the age of a wait is not known otherwise."""
    before = {rank.process.pid: rank for job in find() for rank in job.ranks}
    looks: list[Look] = []
    for pause_s in (min(_GLANCE_S, longest_s), longest_s):
        time.sleep(pause_s)
        looks = [Look(job, before) for job in find()]
        if all(wait.known or wait.seconds >= longest_s for look in looks for wait in look.waits()):
            break
    return looks


def report(looks: Sequence[Look], longest_s: float, *, as_json: bool) -> int:
    """Write the looks to standard output. Return 1 if a rank waits for longer than ``longest_s`` seconds, else 0."""
    waits = [wait for look in looks for wait in look.waits()]
    if as_json:
        jobs = [
            {
                "waits": [dataclasses.asdict(wait) for wait in look.waits()],
                "ranks": [dataclasses.asdict(line) for line in look.lines()],
            }
            for look in looks
        ]
        sys.stdout.write(json.dumps({"jobs": jobs}, indent=2) + "\n")
    else:
        for look in looks:
            _print(look)
    return int(any(wait.seconds >= longest_s for wait in waits))


def sentence(wait: RankWait) -> str:
    """Return the line of a wait for people."""
    return f"WAIT for {wait.seconds:.1f} s{'' if wait.known else ' or longer'}: {wait.text}"


def _print(look: Look) -> None:
    from rich.console import Console
    from rich.table import Table

    for wait in look.waits():
        sys.stdout.write(f"{sentence(wait)}\n")
    if not look.waits():
        sys.stdout.write("no rank waits for another one, as far as calls of mpicomm show\n")
    for pid in dict.fromkeys(pid for wait in look.waits() for pid in wait.pids):
        sys.stdout.write(f"      fix: `py-spy dump --pid {pid}` shows where that rank is\n")
    table = Table()
    for title, side in _COLUMNS:
        table.add_column(title, justify="right" if side else "left", overflow="fold")
    for line in look.lines():
        table.add_row(*_cells(line), style="bold" if line.waits else None)
    sys.stdout.flush()
    # Without markup, because texts are of the processes.
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160, markup=False, emoji=False).print(table)


_COLUMNS = (
    ("communicator", False),
    ("rank", True),
    ("pid", True),
    ("last call", False),
    ("number", True),
    ("begun s ago", True),
    ("waits for", False),
    ("the process", False),
)


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.communicator,
        str(line.rank),
        str(line.pid),
        line.call,
        str(line.number or ""),
        "" if line.seconds is None else f"{line.seconds:.1f}",
        line.waits_for,
        line.does,
    )
