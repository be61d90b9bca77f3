"""`python -m tests.helpers.programs.lost_ranks RESULTS HOW VICTIM TIMEOUT CALL...`: which errors do survivors get?

All ranks set up what the calls need. If HOW is `kill` or `stop`, the rank VICTIM is then killed or stopped. If HOW is
`cut`, the test that started the job cuts a host off. All other ranks make the calls when RESULTS has the file `lost`.
Each writes a line of JSON per call into a file of RESULTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

from tests.helpers.jobs.in_child import begin_in_child
from tests.helpers.jobs.pace import HANG_S

CALLS = ("zeros", "Free", "Communicator", "Split", "Allreduce")
"""The calls that mpicomm itself carries out: a call, the end of a communicator, the set-up of a communicator and of its
child, and a collective.
"""
ROW = "Allreduces"
"""Collectives, one after the other, until one raises."""


@dataclass
class Call:
    """The result of one call on one rank: the class and the text of its error, the ranks it names, its duration."""

    name: str
    error: str
    text: str
    ranks: list[int]
    seconds: float


def main(results: Path, how: str, victim: int, timeout_s: float, names: list[str]) -> None:
    """Lose a rank or a host, and make the calls."""
    import numpy as np
    from mpi4py import MPI  # imported here, because `begin_in_child` has to fork before MPI starts

    import mpicomm

    world = MPI.COMM_WORLD
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
    deadline = time.monotonic() + HANG_S
    while not (results / "lost").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    with (results / f"rank-{world.rank}").open("w", buffering=1) as file:
        for name in names:
            start = time.monotonic()
            try:
                calls[name]()
                while name == ROW:
                    start = time.monotonic()
                    calls[name]()
            except Exception as error:
                ranks = list(error.ranks) if isinstance(error, mpicomm.MpicommError) else []
                call = Call(name, type(error).__name__, str(error), ranks, time.monotonic() - start)
            else:
                call = Call(name, "", "", [], time.monotonic() - start)
            file.write(json.dumps(astuple(call)) + "\n")
    (results / f"end-{world.rank}").touch()


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    begin_in_child(directory)  # so that the launcher does not end the job with the victim
    main(directory, sys.argv[2], int(sys.argv[3]), float(sys.argv[4]), sys.argv[5:])
    os._exit(0)  # MPI_Finalize would wait for the victim
