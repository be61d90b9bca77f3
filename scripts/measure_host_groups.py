"""Measure host arrays between groups against MPI alone: `mpiexec -n N python scripts/measure_host_groups.py`.

The ranks claim to be on two hosts. Where MPIR_CVAR_NUM_CLIQUES is 2 MPICH does so, too, and uses the network. A
Communicator and plain mpi4py take turns with the same arrays. Times are microseconds: medians of the slowest rank.
``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from result_file import Table, add_tables, command, hardware
from rich.console import Console

from mpicomm.cli.arguments import output_file
from mpicomm.cli.machine import processor
from mpicomm.sizes import format_size, nbytes_of

WORLD = MPI.COMM_WORLD
SUM_CALLS = ("Allreduce", "Reduce_scatter_block")
CALLS = (*SUM_CALLS, "Allgather", "Alltoall", "Bcast")
COLUMNS = ["collective", "size", "mpicomm, us", "MPI, us", "MPI's time by mpicomm's"]


def in_turns(works: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the median of microseconds of each call, of the slowest rank."""
    seconds: list[list[float]] = [[] for _ in works]
    for number in range(rounds + 2):
        for index in range(len(works)):
            at = (index + number) % len(works)
            WORLD.Barrier()
            start = time.perf_counter()
            works[at]()
            seconds[at].append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return [1e6 * statistics.median(each[2:]) for each in seconds]


def call_of(name: str, nbytes: int) -> tuple[Callable[[Any], object], Any]:
    """Return the call, which takes a communicator, and its result; a rank's largest buffer has ``nbytes``."""
    blocks = np.random.default_rng(WORLD.rank).integers(-8, 8, (WORLD.size, max(nbytes // 4 // WORLD.size, 1)))
    send = blocks.astype(np.float32)
    if name == "Bcast":
        return lambda comm: comm.Bcast(send), send
    given = send[0].copy() if name == "Allgather" else send
    result = np.empty_like(send[0] if name == "Reduce_scatter_block" else send)
    return lambda comm: getattr(comm, name)(given, result), result


def main() -> None:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sizes", default="8,1K,64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=51)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    os.environ["MPICOMM_HOSTID"] = f"host{WORLD.rank * 2 // WORLD.size}"

    import mpicomm  # the variable is for the communicator below

    rows: list[list[Any]] = []
    with mpicomm.Communicator(WORLD, device="cpu") as comm:
        if comm.rank == 0:
            Console(width=140).print(*(f"{name:>24}" for name in COLUMNS))
        for name in CALLS:
            for size in options.sizes.split(","):
                # Both use the same arrays, because the time depends on where these lie in the caches.
                call, result = call_of(name, nbytes_of(size))
                call(comm)
                found = result.copy()
                result[...] = found if name == "Bcast" and comm.rank == 0 else np.nan
                call(WORLD)
                if not (result == found).all():
                    raise SystemExit(f"{name} of {size}: wrong data")
                ours, plain = in_turns((partial(call, comm), partial(call, WORLD)), options.rounds)
                rows.append([name, format_size(nbytes_of(size)), round(ours, 1), round(plain, 1)])
                rows[-1].append(round(plain / ours, 2))
                if comm.rank == 0:
                    Console(width=140).print(*(f"{cell:>24}" for cell in rows[-1]))
    if WORLD.rank == 0 and options.json is not None:
        text = (
            f"{WORLD.size} ranks of one machine that claim to be on 2 hosts, also to MPICH (MPIR_CVAR_NUM_CLIQUES=2)."
        )
        title = f"Host arrays between two groups against MPI alone, {WORLD.size} ranks"
        where = hardware([], processor())
        add_tables(options.json, [Table("Calls", title, where, COLUMNS, rows, text=text, command=command(WORLD.size))])


main()
