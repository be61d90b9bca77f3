"""The jobs that run on this machine: the ranks with activity that the doctor may read, grouped by job."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from mpicomm.activity.reading import Activity, OtherVersionError, read_activity
from mpicomm.doctor import processes
from mpicomm.doctor.processes import Process
from mpicomm.errors import InvalidUsageError


@dataclass(frozen=True)
class Rank:
    """A rank at one moment."""

    process: Process
    activity: Activity
    world: int
    """The process that has launched its MPI.COMM_WORLD, or else a number of only this rank."""
    time_ns: int
    """The moment, by the monotonic clock."""


@dataclass(frozen=True)
class Job:
    """The ranks on this machine that communicate, and other processes of their launchers."""

    ranks: tuple[Rank, ...]
    unseen: dict[tuple[int, int], Process]
    """Processes of the same launchers that have made no Communicator, by world and rank in MPI.COMM_WORLD."""


def look(numbers: Iterable[int]) -> list[Rank]:
    """Return the processes in ``numbers`` that are ranks and that the doctor may read."""
    found = []
    for pid in numbers:
        with suppress(OSError, OtherVersionError):
            rank = _rank(pid)
            if rank is not None:
                found.append(rank)
    return found


def jobs_of_user() -> list[Job]:
    """Return the jobs of this user. Raises `InvalidUsageError` if there is none."""
    mine = _pids_of_user(os.geteuid())
    jobs = _jobs(look(mine), mine)
    if not jobs:
        raise InvalidUsageError(
            f"--job: {_user(os.geteuid())} has no process on this machine that has made a Communicator"
        )
    return jobs


def job_of(pid: int) -> Job:
    """Return the job of a process: of a rank, or of the mpiexec, or any other process, that has started ranks.

    Raises `InvalidUsageError` if there is no such process, if it belongs to another user, or if it neither is nor has
    started a rank.
    """
    try:
        owner = processes.owner_of(pid)
        rank = _rank(pid)
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
    peers = _pids_of_user(owner)
    ranks = look(peers)
    wanted = {pid} if rank is not None else _descendants(pid, ranks)
    for job in _jobs(ranks, peers):
        if any(each.process.pid in wanted for each in job.ranks):
            return job
    process = processes.process_of(pid)
    raise InvalidUsageError(
        f"--pid {pid}: {process.command if process else 'the process'} is no program of mpicomm, or has not begun to "
        "make its first Communicator"
    )


def _rank(pid: int) -> Rank | None:
    activity = read_activity(pid)
    # A forked child has the memory of its parent.
    if activity is None or activity.pid != processes.own_number(pid):
        return None
    process = processes.process_of(pid)
    if process is None:
        return None
    return Rank(process, activity, processes.launched(pid)[0] or -pid, time.monotonic_ns())


def _pids_of_user(user: int) -> list[int]:
    found = []
    for pid in processes.pids():
        with suppress(OSError):
            if processes.owner_of(pid) == user:
                found.append(pid)
    return found


def _descendants(pid: int, ranks: Sequence[Rank]) -> set[int]:
    found = set()
    for rank in ranks:
        process: Process | None = rank.process
        while process is not None and process.parent:
            if process.parent == pid:
                found.add(rank.process.pid)
                break
            process = processes.process_of(process.parent)
    return found


def _jobs(ranks: Sequence[Rank], numbers: Sequence[int]) -> list[Job]:
    """Group the ranks that one launcher has started, or that share a communicator."""
    groups: list[tuple[set[int], list[Rank]]] = []
    for rank in ranks:
        marks = {rank.world, *(calls.key << 32 for calls in rank.activity.communicators)}
        together = [group for group in groups if group[0] & marks]
        groups = [group for group in groups if not group[0] & marks]
        marks = marks.union(*(shared for shared, _ in together))
        groups.append((marks, [*(member for _, members in together for member in members), rank]))
    unseen = _unseen(ranks, numbers)
    return [
        Job(
            tuple(sorted(members, key=lambda rank: (rank.world, rank.activity.world_rank))),
            {place: process for place, process in unseen.items() if place[0] in marks},
        )
        for marks, members in groups
    ]


def _unseen(ranks: Sequence[Rank], numbers: Sequence[int]) -> dict[tuple[int, int], Process]:
    worlds = {rank.world for rank in ranks}
    seen = {(rank.world, rank.activity.world_rank) for rank in ranks}
    found: dict[tuple[int, int], Process] = {}
    for pid in sorted(numbers):  # a rank's first process comes first, unless numbers have started again
        world, launch = processes.launched(pid)
        place = world, launch.rank
        if launch.size and world in worlds and place not in seen and place not in found:
            process = processes.process_of(pid)
            if process is not None:
                found[place] = process
    return found


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"
