"""Measure one-sided calls of windows between two GPUs.

Run `mpirun -np 2 python -m mpi4py scripts/measuring/measure_windows.py`. Rank 0 accesses the memory of rank 1, which
does nothing meanwhile. Only in fences both ranks take part. Put and Get stand beside ``put`` and ``get`` of a symmetric
array. Accumulate stands beside a bare kernel of ``red`` instructions. Each row is the median of rounds that take turns.
The script checks all results. ``--json FILE`` adds the rows to a result file.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from needed import cupy
from result_file import Sheet, measuring_parser

import mpicomm

NBYTES = 64 << 20
ROUNDS, REPEATS = 9, 10
CAPTURED = 100  # calls in a graph
ISSUED = 200  # calls in a row, whose issue is timed
LAUNCHES = 5  # of a graph
_BARE = r"""
extern "C" __global__ void bare(float* to, const float* from, unsigned long long count) {
  const unsigned long long threads = static_cast<unsigned long long>(gridDim.x) * blockDim.x;
  for (unsigned long long i = static_cast<unsigned long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    asm volatile("red.relaxed.sys.global.add.f32 [%0], %1;" ::"l"(to + i), "f"(from[i]) : "memory");
  }
}
"""


def device_us(stream: Any, act: Callable[[], object], repeats: int) -> float:
    """Return the time of the device for a call of ``act``."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    act()
    start.record(stream)
    for _ in range(repeats):
        act()
    stop.record(stream)
    stop.synchronize()
    return float(cupy.cuda.get_elapsed_time(start, stop)) * 1000 / repeats


def host_us(stream: Any, act: Callable[[], object], repeats: int) -> float:
    """Return the time of the host for a call of ``act``."""
    act()
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        act()
    passed = time.perf_counter() - start
    stream.synchronize()
    return passed * 1e6 / repeats


def medians(acts: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median of each measurement, all in turns."""
    found: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(ROUNDS):
        for name, act in acts.items():
            found[name].append(act())
    return {name: statistics.median(times) for name, times in found.items()}


def captured(stream: Any, act: Callable[[], object]) -> Callable[[], float]:
    """Return a function that measures the time of the device for a call of ``act`` in a CUDA graph."""
    act()  # loads the kernels
    stream.synchronize()
    stream.begin_capture()
    for _ in range(CAPTURED):
        act()
    graph = stream.end_capture()
    return lambda: device_us(stream, lambda: graph.launch(stream), LAUNCHES) / CAPTURED


Row = list[Any]
COLUMNS = ["call", "time of", "us", "beside it", "us", "times as long"]


def row(call: str, where: str, us: float, beside: str = "", us_beside: float | None = None) -> Row:
    """Return a row of the table."""
    if us_beside is None:
        return [call, where, round(us, 2), None, None, None]
    return [call, where, round(us, 2), beside, round(us_beside, 2), round(us / us_beside, 3)]


class Windows:
    """A window of 64 MiB of floats and a few integers, and a symmetric array."""

    def __init__(self, comm: mpicomm.Communicator) -> None:
        self.comm = comm
        self.count = NBYTES // 4
        self.win = mpicomm.Win.Allocate(NBYTES + 4096, 1, MPI.INFO_NULL, comm, place="device")
        self.symmetric = comm.zeros(self.count, np.float32)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.win.tomemory()[...] = 0
        cupy.cuda.Device().synchronize()
        comm.Barrier()

    def copies(self) -> list[Row]:
        """Put and Get."""
        win, symmetric, stream = self.win, self.symmetric, self.stream
        x, y = cupy.arange(self.count, dtype=np.float32) % 97, cupy.empty(self.count, np.float32)
        times = medians(
            {
                "Put": lambda: device_us(stream, lambda: win.Put(x, 1), REPEATS),
                "a.put": lambda: device_us(stream, lambda: symmetric.put(x, 1), REPEATS),
                "Get": lambda: device_us(stream, lambda: win.Get(y, 1), REPEATS),
                "a.get": lambda: device_us(stream, lambda: symmetric.get(1, y), REPEATS),
            }
        )
        win.Get(y, 1)
        assert bool((x == y).all())
        return [
            row(f"{call} of 64 MiB", "device", times[call], plain, times[plain])
            for call, plain in (("Put", "a.put"), ("Get", "a.get"))
        ]

    def sums(self) -> Row:
        """Accumulate."""
        win, stream, count = self.win, self.stream, self.count
        bare = cupy.RawKernel(_BARE, "bare")
        remote = win.Shared_query(1)[0][:NBYTES].view(np.float32)
        blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
        x, y = cupy.ones(count, np.float32), cupy.empty(count, np.float32)
        win.Put(cupy.zeros(count, np.float32), 1)
        arguments = remote, x, np.uint64(count)
        times = medians(
            {
                "Accumulate": lambda: device_us(stream, lambda: win.Accumulate(x, 1), REPEATS),
                "bare": lambda: device_us(stream, lambda: bare((blocks,), (256,), arguments), REPEATS),
            }
        )
        win.Get(y, 1)
        assert bool((y == 2 * ROUNDS * (REPEATS + 1)).all())
        return row(
            "Accumulate of 64 MiB of float32", "device", times["Accumulate"], "a kernel of red.add", times["bare"]
        )

    def small(self) -> list[Row]:
        """Calls on 8 bytes: the time of the host, and the time of the device in a graph."""
        win, stream = self.win, self.stream
        one, before, total = (cupy.array([value], np.int64) for value in (1, 0, 0))
        part = self.symmetric.local[:2]
        calls: dict[str, Callable[[], object]] = {
            "Put": lambda: win.Put(one, 1, NBYTES),
            "Get": lambda: win.Get(before, 1, NBYTES),
            "Accumulate": lambda: win.Accumulate(one, 1, NBYTES + 8),
            "Fetch_and_op": lambda: win.Fetch_and_op(one, before, 1, NBYTES + 16),
            "a.put": lambda: self.symmetric.put(part, 1),
        }
        times = medians({name: partial(host_us, stream, act, ISSUED) for name, act in calls.items()})
        win.Get(total, 1, NBYTES + 16)
        sums = ROUNDS * (ISSUED + 1)
        assert int(total[0]) == sums and int(before[0]) == sums - 1
        rows = [
            row(f"{name} of 8 B", "host", us, "a.put", times["a.put"]) for name, us in times.items() if name != "a.put"
        ]
        fetch = captured(stream, calls["Fetch_and_op"])
        us = statistics.median(fetch() for _ in range(ROUNDS))
        assert int(before[0]) == sums + ROUNDS * (LAUNCHES + 1) * CAPTURED
        return [*rows, row("Fetch_and_op of 8 B", "device, in a graph", us)]

    def lock(self) -> Row:
        """A lock, a Put of 8 bytes, and the end of the lock."""
        win, one = self.win, cupy.ones(1, np.int64)

        def act() -> None:
            win.Lock(1)
            win.Put(one, 1, NBYTES + 24)
            win.Unlock(1)

        locked = captured(self.stream, act)
        return row("Lock, Put of 8 B, Unlock", "device, in a graph", statistics.median(locked() for _ in range(ROUNDS)))

    def fence(self) -> Row:
        """A fence of both ranks. Collective."""
        fenced = captured(self.stream, self.win.Fence)
        self.comm.Barrier()
        return row("Fence", "device, in a graph", statistics.median(fenced() for _ in range(ROUNDS)))


def measure(comm: mpicomm.Communicator) -> list[Row]:
    """Return the rows of rank 0. Collective."""
    windows = Windows(comm)
    rows: list[Row] = []
    with windows.stream:
        if comm.rank == 0:
            windows.win.Lock(1)
            rows += [*windows.copies(), windows.sums(), *windows.small()]
            windows.win.Unlock(1)
            rows.append(windows.lock())
        comm.check()
        comm.Barrier()
        rows.append(windows.fence())
    comm.check()
    comm.Barrier()
    windows.win.Free()
    return rows


def main() -> None:
    """Measure, and print the rows on rank 0."""
    parser = measuring_parser(__doc__)
    options = parser.parse_args()
    text = (
        "Rank 0 accesses the memory of rank 1, which takes part only in fences. Events time "
        f"{REPEATS} calls, or {LAUNCHES} launches of a graph of {CAPTURED} calls. The time of the host is for "
        f"{ISSUED} equal calls in a row. All times are medians of {ROUNDS} rounds."
    )
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        if comm.size != 2 or comm.device == "cpu":
            sys.exit("run it with 2 ranks on GPUs: mpirun -np 2 python -m mpi4py scripts/measuring/measure_windows.py")
        title = "Windows between two GPUs"
        with Sheet(comm, options, title, COLUMNS, digits=3, group="Mapped memory", text=text) as sheet:
            for cells in measure(comm):
                sheet.add(*cells)


if __name__ == "__main__":
    main()
