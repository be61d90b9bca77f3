"""Processes of this machine as /proc shows them to other processes of their user."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpicomm.activity.reading import printable
from mpicomm.cli.launch import JobLaunch, launch_of

_PROC = Path("/proc")
_MOST = 100  # characters of a command
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A process at one moment."""

    pid: int
    parent: int
    command: str
    state: str = "S"
    """The kernel's letter for the main thread: R for running, S for sleeping, T for stopped, ..."""
    cpu_s: float = 0.0
    """The processor time that the main thread has taken so far."""
    sleeps_in: str = ""
    """The kernel's function in which the main thread sleeps; "" if it does not sleep, or if the kernel hides it."""


def process_of(pid: int) -> Process | None:
    """Return a process, or None if it does not exist, or has ended and only its exit code is left."""
    folder = _PROC / str(pid)
    try:
        # The name is in brackets, and may itself have blanks and brackets.
        facts = (folder / "task" / str(pid) / "stat").read_text().rpartition(")")[2].split()
        words = (folder / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    if facts[0] in "ZX":
        return None
    command = " ".join(" ".join(os.fsdecode(word) for word in words).split())
    cpu_s = (int(facts[11]) + int(facts[12])) / _TICKS
    return Process(pid, int(facts[1]), printable(command[:_MOST]), facts[0], cpu_s, _sleeps_in(folder))


def pids() -> list[int]:
    """Return the numbers of all processes."""
    return [int(name) for name in os.listdir(_PROC) if name.isdecimal()]  # noqa: PTH208


def owner_of(pid: int) -> int:
    """Return the user of a process. Raises `FileNotFoundError` if there is no such process."""
    return (_PROC / str(pid)).stat().st_uid


def own_number(pid: int) -> int:
    """Return the number of a process in its own namespace, as the process sees it."""
    for line in (_PROC / str(pid) / "status").read_text().splitlines():
        if line.startswith("NSpid:"):
            return int(line.split()[-1])
    return pid


def launched(pid: int) -> tuple[int, JobLaunch]:
    """Return the process that has launched the rank of a process, 0 for none, and the rank's place.

    The launcher is the first parent without a rank in its environment. It is the same for all ranks that one mpiexec
    has started on this machine, even if other processes run between them.
    """
    mine = _launch(pid)
    if not mine.size:
        return 0, mine
    seen = pid
    while (process := process_of(seen)) is not None and process.parent and _launch(process.parent).size:
        seen = process.parent
    return (process.parent if process else 0), mine


def _launch(pid: int) -> JobLaunch:
    try:
        content = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:  # a process of another user, such as the daemons that start ranks
        return JobLaunch()
    pairs = (os.fsdecode(word).partition("=") for word in content.split(b"\0"))
    return launch_of({name: value for name, _, value in pairs})


def _sleeps_in(folder: Path) -> str:
    with suppress(OSError):
        said = (folder / "wchan").read_text().strip()
        return "" if said in ("0", "") else said
    return ""
