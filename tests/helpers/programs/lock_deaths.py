"""`python -m tests.helpers.programs.lock_deaths RESULTS HOW TIMEOUT`: the last rank dies while it has a lock.

HOW is `exclusive` or `shared`: the rank dies while it holds such a lock of rank 0. If HOW is `waiting`, the rank dies
while it waits for the lock. All other ranks then make calls. Each writes a line of JSON per call into RESULTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.jobs.in_child import KILLED, begin_in_child
from tests.helpers.jobs.pace import HANG_S

WAYS = ("exclusive", "shared", "waiting")


@dataclass
class Call:
    """The result of one call on one rank: the class and the text of its error, the ranks it names, its duration."""

    name: str
    error: str
    text: str
    ranks: list[int]
    seconds: float


def main(results: Path, how: str, timeout_s: float) -> None:
    """Let the last rank die, and make the calls of the others."""
    from mpi4py import MPI  # imported here, because `begin_in_child` has to fork before MPI starts

    import mpicomm
    from tests.helpers.rigs.communicators import array_module

    world = MPI.COMM_WORLD
    comm = mpicomm.Communicator(world.Dup(), timeout_s=timeout_s)
    win = mpicomm.Win.Allocate(8, 8, comm=comm, place="device")
    with array_module(comm) as xp:
        one, seen = xp.ones(1, "i8"), xp.zeros(1, "i8")
    victim = comm.size - 1

    def access(rank: int, lock_type: int) -> None:
        win.Lock(rank, lock_type)
        win.Put(one, rank)
        win.Get(seen, rank)
        win.Unlock(rank)
        comm.check()
        assert int(seen[0]) == 1

    for rank in range(victim):
        access(rank, MPI.LOCK_SHARED)  # nothing is imported or compiled later
    world.Barrier()
    if how == "waiting" and world.rank == 0:
        win.Lock(0)
        comm.check()
    world.Barrier()
    if world.rank == victim:
        if how == "waiting":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGKILL)).start()
        win.Lock(0, MPI.LOCK_SHARED if how == "shared" else MPI.LOCK_EXCLUSIVE)
        comm.check()  # it waits for the stream
        os.kill(os.getpid(), signal.SIGKILL)
    calls: list[tuple[str, Callable[[], object]]] = []
    if how == "waiting" and world.rank == 0:
        calls.append(("Unlock", lambda: win.Unlock(0)))
    if victim > 1:
        calls.append(("other lock", lambda: access(1, MPI.LOCK_EXCLUSIVE)))
    if how == "shared":
        calls.append(("shared lock", lambda: access(0, MPI.LOCK_SHARED)))
        calls.append(("meet", lambda: meet(results, world.rank, victim)))  # a rank that shares lets waiting ranks pass
    if how != "waiting" or world.rank == 0:  # another rank may have its turn before the victim
        calls.append(("lock", lambda: access(0, MPI.LOCK_EXCLUSIVE)))
    require_file(results / KILLED)
    with (results / f"rank-{world.rank}").open("w", buffering=1) as file:
        for name, act in calls:
            file.write(json.dumps(astuple(made(name, act))) + "\n")
    (results / f"end-{world.rank}").touch()
    if world.rank == 0:
        for rank in range(victim):
            require_file(results / f"end-{rank}")
        (results / "done").touch()


def made(name: str, act: Callable[[], Any]) -> Call:
    """Make a call."""
    start = time.monotonic()
    try:
        act()
    except Exception as error:
        ranks = list(getattr(error, "ranks", ()))
        return Call(name, type(error).__name__, str(error), ranks, time.monotonic() - start)
    return Call(name, "", "", [], time.monotonic() - start)


def meet(results: Path, rank: int, ranks: int) -> None:
    """Wait for all ranks that live; MPI would wait for the victim, too."""
    (results / f"meet-{rank}").touch()
    for each in range(ranks):
        require_file(results / f"meet-{each}")


def require_file(path: Path) -> None:
    """Wait for a file."""
    deadline = time.monotonic() + HANG_S
    while not path.exists():
        assert time.monotonic() < deadline, f"there is no {path}"
        time.sleep(0.01)


if __name__ == "__main__":
    begin_in_child(Path(sys.argv[1]))  # so that the launcher does not end the job with the victim
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))
    os._exit(0)  # MPI_Finalize would wait for the victim
