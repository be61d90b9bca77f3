"""Time Alltoallv with counts on the device against the same call with counts of the host, in graphs, and its issue.

Run it on GPUs: ``mpirun -np 2 python scripts/measuring/measure_device_counts.py [--json FILE]``. Both calls move the
same uneven blocks between the same arrays. Each time is the median of several rounds, in which the calls take turns.
Rank 0 prints the table. Each row was checked.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from in_turns import graph_us
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, measuring_parser

import mpicomm
from mpicomm.cli.arguments import parse_size
from mpicomm.sizes import format_size

_SIZES = tuple(1 << shift for shift in range(10, 29, 2))
_CALLS = 20
_ROUNDS = 15


def _sizes(text: str) -> list[int]:
    return [parse_size(size) for size in text.split(",")]


def _issue_us(call: Callable[[], None]) -> float:
    """Return the median time in which the host enqueues a call."""
    times = []
    for _ in range(200):
        begin = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - begin) / 1e3)
        cupy.cuda.Device().synchronize()
    return statistics.median(times)


def _row(comm: mpicomm.Communicator, nbytes: int) -> tuple[float, ...]:
    """Return the times with counts of the host and with counts on the device: of calls in graphs, then of the issue."""
    size, rank = comm.size, comm.rank
    elements = nbytes // 4
    matrix = np.array([[elements * (2 * ((a + b) % size) + 1) // size**2 for b in range(size)] for a in range(size)])
    counts, coming = matrix[rank], matrix[:, rank]
    x = cupy.arange(elements, dtype=cupy.float32) + rank * 1000
    by_host, y = cupy.zeros(int(coming.sum()), cupy.float32), cupy.zeros(2 * elements, cupy.float32)
    on_device, received = cupy.asarray(counts), cupy.zeros(size, cupy.int64)
    sent_by_host, received_by_host = [x, counts.tolist()], [by_host, coming.tolist()]
    sent, taken = [x, on_device], [y, received]
    cupy.cuda.Device().synchronize()

    def host() -> None:
        comm.Alltoallv(sent_by_host, received_by_host)

    def device() -> None:
        comm.Alltoallv(sent, taken)

    for _ in range(20):  # the ranks set up the inboxes that the lengths of both calls need
        host()
        device()
    cupy.cuda.Device().synchronize()
    comm.check()
    assert (received.get() == coming).all(), "the counts are wrong"
    assert (y[: len(by_host)] == by_host).all() and not y[len(by_host) :].any(), "the data is wrong"
    by_call = graph_us(comm, (host, device), _CALLS, _ROUNDS)
    issue = [_issue_us(call) for call in (host, device)]
    comm.check()
    return (*by_call, *issue)


def main() -> None:
    """Measure and print; write the table if a file is named."""
    parser = measuring_parser(__doc__)
    parser.add_argument("--sizes", type=_sizes, default=_SIZES, metavar="SIZE,...", help="as in 1K,16M")
    options = parser.parse_args()
    columns = ["sent", "counts of the host, us", "counts on the GPU, us", "ratio"]
    columns += ["issue with counts of the host, us", "issue with counts on the GPU, us"]
    text = (
        f"Each rank sends uneven blocks of float32. A CUDA graph has {_CALLS} calls. Times are medians of {_ROUNDS} "
        "rounds, in which both graphs take turns, on the slowest rank. Issue is the time of the host in a known call."
    )
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        if comm.device == "cpu":
            sys.exit("measure_device_counts.py needs GPUs")
        title = f"Alltoallv with counts on the GPU, {comm.size} ranks"
        with Sheet(comm, options, title, columns, text=text) as sheet, cupy.cuda.Stream(non_blocking=True):
            for nbytes in options.sizes:
                by_host, on_device, *issue = _row(comm, nbytes)
                sheet.add(format_size(nbytes), by_host, on_device, on_device / by_host, *issue)


main()
