"""`python -m tests.helpers.programs.lost_ranks RESULTS HOW VICTIM TIMEOUT CALL...`: which errors do survivors get?

All ranks set up what the calls need. If HOW is `kill` or `stop`, the rank VICTIM is then killed or stopped. If HOW is
`cut`, the test that started the job cuts a host off. All other ranks make the calls when RESULTS has the file `lost`.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from tests.helpers.jobs.survivors import await_files, make_calls, run_in_child

CALLS = ("zeros", "Free", "Communicator", "Split", "Allreduce")
"""The calls that mpicomm itself carries out: a call, the end of a communicator, the set-up of a communicator and of its
child, and a collective.
"""
ROW = "Allreduces"
"""Collectives, one after the other, until one raises."""


def main(results: Path, how: str, lost: str, limit_s: str, *names: str) -> None:
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


if __name__ == "__main__":
    run_in_child(main, *sys.argv[1:])
