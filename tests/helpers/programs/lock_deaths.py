"""`python -m tests.helpers.programs.lock_deaths RESULTS HOW TIMEOUT`: the last rank dies while it has a lock.

HOW is `exclusive` or `shared`: the rank dies while it holds such a lock of rank 0. If HOW is `waiting`, the rank dies
while it waits for the lock. All other ranks then make calls.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from tests.helpers.jobs.survivors import KILLED, await_files, end_job, make_calls, run_in_child

WAYS = ("exclusive", "shared", "waiting")


def main(results: Path, how: str, timeout_s: str) -> None:
    """Let the last rank die, and make the calls of the others."""
    from mpi4py import MPI  # imported here, because the rank has to fork before MPI starts

    import mpicomm
    from tests.helpers.rigs.communicators import array_module

    world = MPI.COMM_WORLD
    comm = mpicomm.Communicator(world.Dup(), timeout_s=float(timeout_s))
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
    await_files(results / KILLED)
    make_calls(results, world.rank, calls)
    end_job(results, world.rank, victim)


def meet(results: Path, rank: int, ranks: int) -> None:
    """Wait for all ranks that live; MPI would wait for the victim, too."""
    (results / f"meet-{rank}").touch()
    await_files(*(results / f"meet-{each}" for each in range(ranks)))


if __name__ == "__main__":
    run_in_child(main, *sys.argv[1:])
