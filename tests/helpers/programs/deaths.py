"""Ranks die, stop or lose their network: which errors do the others get, and in time?

`python -m tests.helpers.programs.deaths RESULTS PROGRAM ...` runs one of three programs:

* `product DEVICE KIND HOW TIMEOUT`: all ranks make the call KIND, a method of `Communicator`. When they make it again,
  the last rank dies in the last product that it has to multiply: by a signal if HOW is `kill`, without a word if HOW is
  `exit`. All other ranks make the call until it raises. The file `products-<r>` has the number of products into which a
  call is cut on a rank.
* `lock HOW TIMEOUT`: the last rank dies while it holds a lock of rank 0, which is `exclusive` or `shared` as HOW says.
  If HOW is `waiting`, it dies while it waits for the lock. All other ranks then make calls.
* `lost HOW VICTIM TIMEOUT CALL...`: all ranks set up what the calls need. If HOW is `kill` or `stop`, the rank VICTIM
  is then killed or stopped. If HOW is `cut`, the test that started the job cuts a host off. All other ranks make the
  calls when RESULTS has the file `lost`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.survivors import KILLED, await_files, calls_of, end_job, make_calls, run_in_child

PROGRAM = ("-m", "tests.helpers.programs.deaths")
DEATHS = [("allgather_matmul", "kill"), ("matmul_reduce_scatter", "exit"), ("matmul_allreduce", "kill")]
"""Products, and how a rank dies in them."""
WAYS = ("exclusive", "shared", "waiting")
"""How a rank dies that has a lock, or waits for it."""
CALLS = ("zeros", "Free", "Communicator", "Split", "Allreduce")
"""The calls that mpicomm itself carries out: a call, the end of a communicator, the set-up of a communicator and of its
child, and a collective.
"""
ROW = "Allreduces"
"""Collectives, one after the other, until one raises."""


def require_named(results: Path, ranks: int, device: str, kind: str, how: str, timeout_s: float) -> None:
    """Run a job, and assert that the last calls of the survivors name the last rank in time."""
    victim = ranks - 1
    job = run_job(ranks, *PROGRAM, str(results), "product", device, kind, how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    for rank in range(victim):
        (call,) = calls_of(results, rank)
        call.require_missing(timeout_s, victim, f"rank {victim} did not")


def die_in_a_product(results: Path, device: str, kind: str, how: str, timeout_s: str) -> None:
    """Let the last rank die, and make the calls of the others."""
    from mpi4py import MPI  # imported here, because the rank has to fork before MPI starts

    import mpicomm
    from tests.helpers.rigs.communicators import array_module

    world = MPI.COMM_WORLD
    comm = mpicomm.Communicator(world.Dup(), device="cpu" if device == "cpu" else "auto", timeout_s=float(timeout_s))
    victim = comm.size - 1
    # On GPUs a product overlaps with its collective.
    rows, inner, columns = (24, 16, 8) if device == "cpu" else (3840, 4096 if kind == "allgather_matmul" else 512, 4096)
    multiplied, fatal = 0, 0
    with array_module(comm) as xp:
        a = xp.ones((rows // comm.size if kind == "allgather_matmul" else rows, inner), "f4")
        b = xp.ones((inner, columns), "f4")

        def product(a: Any, b: Any, out: Any) -> None:
            nonlocal multiplied
            multiplied += 1
            if multiplied == fatal:
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                os._exit(0)
            xp.matmul(a, b, out=out)

        def call() -> None:
            getattr(comm, kind)(a, b, product=product)
            comm.check()

        call()
        products = multiplied
        (results / f"products-{world.rank}").write_text(str(products))
        call()  # nothing is imported, compiled or planned later
        if comm.rank == victim:
            fatal = 3 * products
        world.Barrier()
        make_calls(results, world.rank, [(kind, call)], again=[kind])
    end_job(results, world.rank, victim)


def die_at_a_lock(results: Path, how: str, timeout_s: str) -> None:
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


def lose_a_rank(results: Path, how: str, lost: str, limit_s: str, *names: str) -> None:
    """Lose a rank or a host, and make the calls."""
    import numpy as np
    from mpi4py import MPI  # imported here, because the rank has to fork before MPI starts

    import mpicomm

    world, victim, timeout_s = MPI.COMM_WORLD, int(lost), float(limit_s)
    parent = world.Dup()
    zeros, free, split, sums = (mpicomm.Communicator(world, device="cpu", timeout_s=timeout_s) for _ in range(4))
    array = np.ones(1 << 18, np.float16)  # MPI has no such sums
    result = np.empty_like(array)
    sums.Allreduce(array, result)
    for comm in (zeros, free):
        comm.zeros(3)
    child = split.Split()
    assert isinstance(child, mpicomm.Communicator)
    calls: dict[str, Callable[[], object]] = {
        "zeros": lambda: zeros.zeros(4),
        "Free": free.Free,
        "Communicator": lambda: mpicomm.Communicator(parent, device="cpu", timeout_s=timeout_s),
        "Split": lambda: child.zeros(4),
        "Allreduce": lambda: sums.Allreduce(array, result),
        ROW: lambda: sums.Allreduce(array, result),
    }
    world.Barrier()
    (results / f"ready-{world.rank}").touch()
    if world.rank == victim and how != "cut":
        os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    await_files(results / "lost")
    make_calls(results, world.rank, [(name, calls[name]) for name in names], again=[ROW])


def main(results: Path, what: str, *arguments: str) -> None:
    """Run one of the programs."""
    run: dict[str, Callable[..., None]] = {"product": die_in_a_product, "lock": die_at_a_lock, "lost": lose_a_rank}
    run[what](results, *arguments)


if __name__ == "__main__":
    run_in_child(main, *sys.argv[1:])
