"""`python -m tests.helpers.programs.product_deaths RESULTS DEVICE KIND HOW TIMEOUT`: a rank dies in a matrix product.

All ranks make the call KIND, a method of `Communicator`. When they make it again, the last rank dies in the last
product that it has to multiply: by a signal if HOW is `kill`, without a word if HOW is `exit`. All other ranks make the
call until it raises. Each writes a line of JSON about the last call into RESULTS.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tests.helpers.jobs.in_child import begin_in_child
from tests.helpers.jobs.pace import HANG_S


def shape_of(device: str, kind: str) -> tuple[int, int, int]:
    """Return the rows, the inner size and the columns of a product. On GPUs it overlaps with its collective."""
    if device == "cpu":
        return 24, 16, 8
    return 3840, 4096 if kind == "allgather_matmul" else 512, 4096


@dataclass
class Call:
    """The last call on one rank: the class and the text of its error, the ranks it names, its duration."""

    error: str
    text: str
    ranks: list[int]
    seconds: float
    products: int
    """The products into which a call is cut on this rank."""


def main(results: Path, device: str, kind: str, how: str, timeout_s: float) -> None:
    """Let the last rank die, and make the calls of the others."""
    from mpi4py import MPI  # imported here, because `begin_in_child` has to fork before MPI starts

    import mpicomm
    from tests.helpers.rigs.communicators import array_module

    world = MPI.COMM_WORLD
    comm = mpicomm.Communicator(world.Dup(), device="cpu" if device == "cpu" else "auto", timeout_s=timeout_s)
    victim = comm.size - 1
    rows, inner, columns = shape_of(device, kind)
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
        call()  # nothing is imported, compiled or planned later
        if comm.rank == victim:
            fatal = 3 * products
        world.Barrier()
        with (results / f"rank-{world.rank}").open("w") as file:
            file.write(json.dumps(astuple(_last(call, products))) + "\n")
    (results / f"end-{world.rank}").touch()
    if world.rank == 0:
        deadline = time.monotonic() + HANG_S
        while not all((results / f"end-{rank}").exists() for rank in range(victim)):
            assert time.monotonic() < deadline, "a survivor does not come to its end"
            time.sleep(0.01)
        (results / "done").touch()


def _last(call: Any, products: int) -> Call:
    """Make calls until one raises."""
    import mpicomm

    while True:
        start = time.monotonic()
        try:
            call()
        except mpicomm.MpicommError as error:
            seconds = time.monotonic() - start
            return Call(type(error).__name__, str(error), list(error.ranks), seconds, products)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    begin_in_child(directory)  # so that the launcher does not end the job with the victim
    main(directory, sys.argv[2], sys.argv[3], sys.argv[4], float(sys.argv[5]))
    os._exit(0)  # MPI_Finalize would wait for the victim
