"""`python -m tests.helpers.programs.late_rank FOLDER`: three ranks; the last one comes late to each call of `CALLS`.

FOLDER gets the file `CALL-RANK` before a rank comes to a call; the late rank writes it, too, and then waits. The late
rank, process number in the file `late`, makes each call when FOLDER has the file `go-CALL`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.helpers.jobs.pace import HANG_S

CALLS = (
    "Communicator",
    "one_shot",
    "Allreduce",
    "bcast",
    "Recv",
    "recv",
    "zeros",
    "Split",
    "Create_group",
    "Create_group in MPI",
    "nothing",
    "progress",
    "Free",
    "MPI_Finalize",
)
LATE = 2
TAG = 5


def main(folder: Path) -> None:
    """Come to all calls."""
    import numpy as np
    from mpi4py import MPI

    import mpicomm

    world = MPI.COMM_WORLD
    is_late = world.rank == LATE
    mine, ours = np.ones(4), np.empty(4)
    made: list[mpicomm.Communicator] = []
    parts: list[MPI.Intracomm] = []

    def make() -> None:
        made.append(mpicomm.Communicator(device="cpu", timeout_s=HANG_S))
        made[0].Allreduce(mine, ours, algorithm="one_shot")  # the first one sets up memory

    def message(send: Callable[[], object], receive: Callable[[], object]) -> None:
        if is_late:
            send()
        elif world.rank == 0:
            receive()

    def group(parent: MPI.Intracomm) -> None:
        """Make a communicator of the first rank and the late rank, and not of rank 1."""
        if world.rank in (0, LATE):
            everyone = parent.Get_group()
            parent.Create_group(everyone.Incl([0, LATE])).Free()

    def progress() -> None:
        """Exchange messages and sums until the file is there, most of the time in waits for the late rank."""
        going = True
        while going:
            if is_late:
                time.sleep(0.005)
            comm.Sendrecv(mine, (comm.rank + 1) % comm.size, 0, ours, (comm.rank - 1) % comm.size)
            going = comm.bcast(not (folder / "go-progress").exists(), root=LATE)

    calls: dict[str, Callable[[], object]] = {
        "Communicator": make,
        "one_shot": lambda: comm.Allreduce(mine, ours, algorithm="one_shot"),
        "Allreduce": lambda: comm.Allreduce(mine, ours),
        "bcast": lambda: comm.bcast(1, root=LATE),
        "Recv": lambda: message(lambda: comm.Send(mine, 0, TAG), lambda: comm.Recv(ours, LATE, TAG)),
        "recv": lambda: message(lambda: comm.send(1, 0, TAG), lambda: comm.recv(source=LATE, tag=TAG)),
        "zeros": lambda: comm.zeros(3),
        "Split": lambda: parts.append(comm.Split(0)),
        "Create_group": lambda: group(comm),
        "Create_group in MPI": lambda: group(parts[0]),  # it is not set up, so the wait is MPI's
        "nothing": lambda: wait(folder / "go-nothing"),
        "progress": progress,
        "Free": lambda: comm.Free(),
        "MPI_Finalize": lambda: None,
    }
    if is_late:
        (folder / "late").write_text(str(os.getpid()))
    for name in CALLS:
        (folder / f"{name}-{world.rank}").touch()
        if is_late and name != "progress":
            wait(folder / f"go-{name}")
        if made:
            comm = made[0]
        calls[name]()


def wait(file: Path) -> None:
    """Wait in Python until a file is there."""
    until = time.monotonic() + HANG_S
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
