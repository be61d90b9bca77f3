"""Samples of the jobs that run on this machine: their processes from /proc, and their activity pages."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mpicomm.activity.reading import Activity, OtherVersionError, printable, read_activity
from mpicomm.cli.arguments import JobLaunch, launch_of
from mpicomm.errors import InvalidUsageError

_PROC = Path("/proc")
_MAX_CHARS = 100  # characters of a command
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    """A sample of a process."""

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
    cpu_s, sleeps_in = (int(facts[11]) + int(facts[12])) / _TICKS, ""
    with suppress(OSError):
        sleeps_in = (folder / "wchan").read_text().strip().removeprefix("0")
    return Process(pid, int(facts[1]), printable(command[:_MAX_CHARS]), facts[0], cpu_s, sleeps_in)


def launched(pid: int) -> tuple[int, JobLaunch]:
    """Return the launcher of a rank's process, 0 for none, and the rank's numbers in the launch.

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


@dataclass(frozen=True)
class RunningRank:
    """A rank at one moment."""

    process: Process
    activity: Activity
    world: int
    """The process that has launched its MPI.COMM_WORLD, or else a number of only this rank."""
    time_ns: int
    """The moment, by the monotonic clock."""


class RunningJob(NamedTuple):
    """The ranks on this machine that communicate, and other processes of their launchers."""

    ranks: tuple[RunningRank, ...]
    uninitialized: dict[tuple[int, int], Process]
    """Processes of the same launchers that have made no Communicator, by world and rank in MPI.COMM_WORLD."""


def jobs_of_user() -> list[RunningJob]:
    """Return the jobs of this user. Raises `InvalidUsageError` if there is none."""
    jobs = _jobs(os.geteuid())
    if not jobs:
        raise InvalidUsageError(
            f"--job: {_user(os.geteuid())} has no process on this machine that has made a Communicator"
        )
    return jobs


def job_of(pid: int) -> RunningJob:
    """Return the job of a process: of a rank, or of the mpiexec, or any other process, that has started ranks.

    Raises `InvalidUsageError` if there is no such process, if it belongs to another user, or if it neither is nor has
    started a rank.
    """
    try:
        owner = (_PROC / str(pid)).stat().st_uid
        is_rank = _rank(pid) is not None
    except PermissionError:
        raise InvalidUsageError(
            f"--pid {pid}: Linux does not let {_user(os.geteuid())} look into this process of {_user(owner)}: run the "
            "doctor as that user or as root, and in the same container"
        ) from None
    except OtherVersionError:
        raise InvalidUsageError(
            f"--pid {pid}: the process runs another version of mpicomm: run the doctor of that version"
        ) from None
    except FileNotFoundError:
        raise InvalidUsageError(f"--pid {pid}: there is no such process on this machine, or it has ended") from None
    for job in _jobs(owner):
        if any(rank.process.pid == pid if is_rank else pid in _parents(rank.process) for rank in job.ranks):
            return job
    process = process_of(pid)
    raise InvalidUsageError(
        f"--pid {pid}: {process.command if process else 'the process'} is no program of mpicomm, or has not begun to "
        "make its first Communicator"
    )


def _rank(pid: int) -> RunningRank | None:
    """Return a process that is a rank, or None. Raises as `read_activity`."""
    activity, process = read_activity(pid), process_of(pid)
    if activity is None or process is None:
        return None
    status = (_PROC / str(pid) / "status").read_text()
    numbers = status.partition("NSpid:")[2].partition("\n")[0].split() or [str(pid)]
    if activity.pid != int(numbers[-1]):  # its own number, in its namespace: a forked child has its parent's memory
        return None
    return RunningRank(process, activity, launched(pid)[0] or -pid, time.monotonic_ns())


def _parents(process: Process | None) -> Iterator[int]:
    while process is not None and process.parent:
        yield process.parent
        process = process_of(process.parent)


def _jobs(user: int) -> list[RunningJob]:
    """Return the jobs of a user that the doctor may read: ranks of one launcher, or that share a communicator."""
    pids: list[int] = []
    ranks: list[RunningRank] = []
    for name in os.listdir(_PROC):  # noqa: PTH208
        with suppress(OSError, OtherVersionError):  # above all it ends meanwhile
            if name.isdecimal() and (_PROC / name).stat().st_uid == user:
                pids.append(int(name))
                found = _rank(int(name))
                ranks += [] if found is None else [found]
    jobs: list[tuple[set[int], list[RunningRank]]] = []
    for rank in ranks:
        marks, members = {rank.world, *(calls.key << 32 for calls in rank.activity.communicators)}, [rank]
        for job in [job for job in jobs if job[0] & marks]:
            jobs.remove(job)
            marks, members = marks | job[0], job[1] + members
        jobs.append((marks, members))
    uninitialized = _uninitialized(ranks, pids)
    return [
        RunningJob(
            tuple(sorted(members, key=lambda rank: (rank.world, rank.activity.world_rank))),
            {place: process for place, process in uninitialized.items() if place[0] in marks},
        )
        for marks, members in jobs
    ]


def _uninitialized(ranks: Sequence[RunningRank], pids: Sequence[int]) -> dict[tuple[int, int], Process]:
    worlds = {rank.world for rank in ranks}
    seen = {(rank.world, rank.activity.world_rank) for rank in ranks}
    found: dict[tuple[int, int], Process] = {}
    for pid in sorted(pids):  # a rank's first process comes first, unless process numbers have wrapped around
        world, launch = launched(pid)
        place = world, launch.rank
        if launch.size and world in worlds and place not in {*seen, *found} and (process := process_of(pid)):
            found[place] = process
    return found


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
