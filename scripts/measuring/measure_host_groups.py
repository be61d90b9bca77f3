"""Measure host arrays between peer domains against MPI: `mpiexec -n N python scripts/measuring/measure_host_groups.py`.

The ranks claim to be on two hosts. With MPIR_CVAR_NUM_CLIQUES=2 before the command MPICH takes them for two hosts, too.
A Communicator and plain mpi4py take turns with the same arrays. Times are microseconds: the slowest rank's medians.
``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from in_turns import in_turns
from mpi4py import MPI
from result_file import Sheet, measuring_parser

from mpicomm.sizes import format_size, nbytes_of

WORLD = MPI.COMM_WORLD
CALLS = ("Allreduce", "Reduce_scatter_block", "Allgather", "Alltoall", "Bcast")
COLUMNS = ["collective", "size", "mpicomm, us", "MPI, us", "MPI's time by mpicomm's"]


def call_of(name: str, nbytes: int) -> tuple[Callable[[Any], object], Any]:
    """Return the call, which takes a communicator, and its result; a rank's largest buffer has ``nbytes``."""
    blocks = np.random.default_rng(WORLD.rank).integers(-8, 8, (WORLD.size, max(nbytes // 4 // WORLD.size, 1)))
    send = blocks.astype(np.float32)
    if name == "Bcast":
        return lambda comm: comm.Bcast(send), send
    given = send[0].copy() if name == "Allgather" else send
    result = np.empty_like(send[0] if name == "Reduce_scatter_block" else send)
    return lambda comm: getattr(comm, name)(given, result), result


def compare(name: str, nbytes: int, comm: MPI.Intracomm, rounds: int) -> tuple[float, float]:
    """Return the microseconds of ``comm`` and of plain MPI, after a check that both give the same result."""
    # Both use the same arrays, because the time depends on the places of the arrays in the caches.
    call, result = call_of(name, nbytes)
    call(comm)
    found = result.copy()
    if name != "Bcast" or WORLD.rank != 0:  # if the result replaces the input
        result[...] = np.nan
    call(WORLD)
    if not WORLD.allreduce(bool((result == found).all()), MPI.LAND):
        raise SystemExit(f"{name} of {nbytes} bytes: MPI and mpicomm returned different values")
    times = in_turns({"mpicomm": partial(call, comm), "MPI": partial(call, WORLD)}, rounds)
    return 1e6 * times["mpicomm"], 1e6 * times["MPI"]


def main() -> None:
    """Measure, and print on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--sizes", default="8,1K,64K,1M,16M")
    parser.add_argument("--rounds", type=int, default=51)
    options = parser.parse_args()
    os.environ["MPICOMM_HOSTID"] = f"host{WORLD.rank * 2 // WORLD.size}"

    import mpicomm  # the variable is for the communicator below

    domains = os.environ.get("MPIR_CVAR_NUM_CLIQUES", "1")
    text = f"{WORLD.size} ranks of one machine that claim to be on 2 hosts; MPIR_CVAR_NUM_CLIQUES={domains}."
    title = f"Host arrays between two peer domains against MPI alone, {WORLD.size} ranks"
    with mpicomm.Communicator(WORLD, device="cpu") as comm, Sheet(WORLD, options, title, COLUMNS, text=text) as sheet:
        for name in CALLS:
            for size in options.sizes.split(","):
                ours, plain = compare(name, nbytes_of(size), comm, options.rounds)
                sheet.add(name, format_size(nbytes_of(size)), ours, plain, plain / ours)


main()
