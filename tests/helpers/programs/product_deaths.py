"""`python -m tests.helpers.programs.product_deaths RESULTS DEVICE KIND HOW TIMEOUT`: a rank dies in a matrix product.

All ranks make the call KIND, a method of `Communicator`. When they make it again, the last rank dies in the last
product that it has to multiply: by a signal if HOW is `kill`, without a word if HOW is `exit`. All other ranks make the
call until it raises. The file `products-<r>` has the number of products into which a call is cut on a rank.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.survivors import calls_of, end_job, make_calls, run_in_child

DEATHS = [("allgather_matmul", "kill"), ("matmul_reduce_scatter", "exit"), ("matmul_allreduce", "kill")]


def require_named(results: Path, ranks: int, device: str, kind: str, how: str, timeout_s: float) -> None:
    """Run a job, and assert that the last calls of the survivors name the last rank in time."""
    victim = ranks - 1
    job = run_job(ranks, "-m", "tests.helpers.programs.product_deaths", str(results), device, kind, how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    for rank in range(victim):
        (call,) = calls_of(results, rank)
        call.require_missing(timeout_s, victim, f"rank {victim} did not")


def main(results: Path, device: str, kind: str, how: str, timeout_s: str) -> None:
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


if __name__ == "__main__":
    run_in_child(main, *sys.argv[1:])
