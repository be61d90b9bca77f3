"""Measure all-reduces between peer domains of GPUs.

Run `mpiexec -n 4 python scripts/measuring/measure_internode.py [--json FILE]`.

The ranks claim to be on ``--hosts`` hosts, so this also measures ranks of one machine. The engine is the one of
MPICOMM_INTERNODE. *possible* is the time of the copies and of MPI's own Allreduce of the shards that the engine
"pinned" cannot do without: each rank copies its shard to pinned memory, MPI sums the shards of each rail, and each rank
copies the result back. Times are microseconds: medians of the slowest rank, results are checked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import numpy as np
from in_turns import median_us
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, hardware, measuring_parser

from mpicomm.cli.options import rank_record
from mpicomm.sizes import format_size, nbytes_of

WORLD = MPI.COMM_WORLD
COLUMNS = ["size", "engine", "Allreduce", "possible", "possible / Allreduce", "one peer domain"]


def possible(rail: MPI.Intracomm, shards: int, nbytes: int) -> Callable[[], None]:
    """Return the copies of a shard and MPI's Allreduce of it."""
    count = nbytes // 4 // shards
    shard = cupy.ones(count, cupy.float32)
    pinned = [cupy.cuda.alloc_pinned_memory(4 * count) for _ in range(2)]
    sent, received = (np.frombuffer(memory, np.float32, count) for memory in pinned)

    def work() -> None:
        shard.get(out=sent)
        rail.Allreduce(sent, received)
        shard.set(received)

    return work


def main() -> None:
    """Measure, and print on rank 0."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--sizes", default="4K,64K,1M,16M,64M")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    ranks = WORLD.size // options.hosts
    os.environ["MPICOMM_HOSTID"] = f"host{WORLD.rank // ranks}"
    os.environ.setdefault("NCCL_HOSTID", f"rank{WORLD.rank}")  # NCCL takes ranks of one GPU on different hosts alone

    import mpicomm  # the variables are for the communicator below

    rail, near = WORLD.Split(WORLD.rank % ranks, WORLD.rank), WORLD.Split(WORLD.rank // ranks)
    assert isinstance(rail, MPI.Intracomm) and isinstance(near, MPI.Intracomm)
    title = f"Between peer domains: all-reduce, {options.hosts} x {ranks} ranks"
    text = (
        f"{WORLD.size} ranks of one machine that claim to be on {options.hosts} hosts; NCCL takes sockets between "
        'them. *possible* is what the engine "pinned" cannot do without: copies of a shard to the host and back, and '
        "MPI's own Allreduce of the shards. *one peer domain* is an Allreduce of its ranks."
    )
    with (
        mpicomm.Communicator(WORLD) as comm,
        mpicomm.Communicator(near) as group,
        Sheet(comm, options, title, COLUMNS, group="Ways compared", text=text) as sheet,
    ):
        info, finish = comm.describe(), cupy.cuda.Device().synchronize
        # The hosts are claimed.
        sheet.table.hardware = hardware([{**each, "node": 0} for each in comm.allgather(rank_record(info))])
        for size in options.sizes.split(","):
            nbytes = nbytes_of(size)
            send = cupy.random.default_rng(comm.rank).random(nbytes // 4, cupy.float32)
            total, expected = cupy.full_like(send, -1), np.empty(nbytes // 4, np.float32)
            ours = median_us(partial(comm.Allreduce, send, total), options.rounds, finish)
            WORLD.Allreduce(send.get(), expected)
            if not np.allclose(total.get(), expected, rtol=1e-5):
                raise SystemExit(f"{size}: wrong data")
            least = median_us(possible(rail, ranks, nbytes), options.rounds, finish)
            inside = median_us(partial(group.Allreduce, send, total), options.rounds, finish)
            sheet.add(format_size(nbytes), info.internode, ours, least, least / ours, inside)


main()
