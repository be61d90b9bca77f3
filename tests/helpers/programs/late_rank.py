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
from typing import Any

from tests.helpers.jobs.pace import HANG_S

LATE = 2
TAG = 5


class Rank:
    """One rank, with its communicator after the first call."""

    comm: Any
    part: Any

    def __init__(self, folder: Path) -> None:
        import numpy as np
        from mpi4py import MPI

        import mpicomm

        self.make_communicator = mpicomm.Communicator
        self.folder, self.world = folder, MPI.COMM_WORLD
        self.is_late = self.world.rank == LATE
        self.mine, self.ours = np.ones(4), np.empty(4)

    def make(self) -> None:
        self.comm = self.make_communicator(device="cpu", timeout_s=HANG_S)
        self.sum_up(algorithm="one_shot")  # the first one sets up memory

    def sum_up(self, **how: str) -> None:
        self.comm.Allreduce(self.mine, self.ours, **how)

    def split(self) -> None:
        self.part = self.comm.Split(0)

    def group(self, parent: Any) -> None:
        """Make a communicator of the first rank and the late rank, and not of rank 1."""
        if self.world.rank in (0, LATE):
            parent.Create_group(parent.Get_group().Incl([0, LATE])).Free()

    def message(self, send: Callable[..., object], receive: Callable[[], object], *sent: Any) -> None:
        if self.is_late:
            send(*sent, 0, TAG)
        elif self.world.rank == 0:
            receive()

    def progress(self) -> None:
        """Exchange messages and sums until the file is there, most of the time in waits for the late rank."""
        comm, going = self.comm, True
        while going:
            if self.is_late:
                time.sleep(0.005)
            comm.Sendrecv(self.mine, (comm.rank + 1) % comm.size, 0, self.ours, (comm.rank - 1) % comm.size)
            going = comm.bcast(not (self.folder / "go-progress").exists(), root=LATE)

    def wait(self, name: str) -> None:
        """Wait in Python until the late rank may make a call."""
        until = time.monotonic() + HANG_S
        while not (self.folder / f"go-{name}").exists():
            assert time.monotonic() < until
            time.sleep(0.02)


CALLS: dict[str, Callable[[Rank], object]] = {
    "Communicator": Rank.make,
    "one_shot": lambda rank: rank.sum_up(algorithm="one_shot"),
    "Allreduce": Rank.sum_up,
    "bcast": lambda rank: rank.comm.bcast(1, root=LATE),
    "Recv": lambda rank: rank.message(rank.comm.Send, lambda: rank.comm.Recv(rank.ours, LATE, TAG), rank.mine),
    "recv": lambda rank: rank.message(rank.comm.send, lambda: rank.comm.recv(source=LATE, tag=TAG), 1),
    "zeros": lambda rank: rank.comm.zeros(3),
    "Split": Rank.split,
    "Create_group": lambda rank: rank.group(rank.comm),
    "Create_group in MPI": lambda rank: rank.group(rank.part),  # it is not set up, so the wait is MPI's
    "nothing": lambda rank: rank.wait("nothing"),
    "progress": Rank.progress,
    "Free": lambda rank: rank.comm.Free(),
    "MPI_Finalize": lambda rank: None,
}


def main(folder: Path) -> None:
    """Come to all calls."""
    rank = Rank(folder)
    if rank.is_late:
        (folder / "late").write_text(str(os.getpid()))
    for name, call in CALLS.items():
        (folder / f"{name}-{rank.world.rank}").touch()
        if rank.is_late and name != "progress":
            rank.wait(name)
        call(rank)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
