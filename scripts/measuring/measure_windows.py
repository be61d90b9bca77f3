"""Measure one-sided calls of windows between two GPUs.

Run `mpirun -np 2 python -m mpi4py scripts/measuring/measure_windows.py`. Rank 0 accesses the memory of rank 1, which
does nothing meanwhile. Put and Get stand beside ``put`` and ``get`` of a symmetric array. Accumulate stands beside a
bare kernel of ``red`` instructions. Each row is the median of rounds that take turns. All results are checked.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from needed import cupy

import mpicomm

NBYTES = 64 << 20
ROUNDS, REPEATS = 9, 10
FETCHES = 100  # in a graph
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


def measure(comm: mpicomm.Communicator) -> list[tuple[str, float, str]]:
    """Return the rows of rank 0. Collective."""
    count = NBYTES // 4
    win = mpicomm.Win.Allocate(NBYTES + 4096, 1, MPI.INFO_NULL, comm, place="device")
    symmetric = comm.zeros(count, np.float32)
    counter = NBYTES  # the displacement of an int64 after the floats
    win.tomemory()[...] = 0
    cupy.cuda.Device().synchronize()
    comm.Barrier()
    rows: list[tuple[str, float, str]] = []
    if comm.rank == 0:
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            x, y = cupy.arange(count, dtype=np.float32) % 97, cupy.empty(count, np.float32)
            one, before = cupy.ones(1, np.int64), cupy.zeros(1, np.int64)
            small = cupy.ones(1, np.int64)
            bare = cupy.RawKernel(_BARE, "bare")
            remote = win.Shared_query(1)[0][:NBYTES].view(np.float32)
            blocks = 8 * cupy.cuda.Device().attributes["MultiProcessorCount"]
            win.Lock(1)
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
            for call, plain in (("Put", "a.put"), ("Get", "a.get")):
                rows.append((f"{call} of 64 MiB, us", times[call], f"{plain} {times[plain]:.1f}"))
            x[...] = 1
            win.Put(cupy.zeros(count, np.float32), 1)
            times = medians(
                {
                    "Accumulate": lambda: device_us(stream, lambda: win.Accumulate(x, 1), REPEATS),
                    "bare": lambda: device_us(
                        stream, lambda: bare((blocks,), (256,), (remote, x, np.uint64(count))), REPEATS
                    ),
                }
            )
            win.Get(y, 1)
            assert bool((y == 2 * ROUNDS * (REPEATS + 1)).all())
            rate = times["bare"] / times["Accumulate"]
            rows.append(("Accumulate of 64 MiB of float32, us", times["Accumulate"], f"{rate:.2f} of a bare kernel"))
            issue = statistics.median(
                host_us(stream, lambda: win.Put(small, 1, counter + 8), 200) for _ in range(ROUNDS)
            )
            rows.append(("Put of 8 B, us of the host", issue, "at most 10"))
            win.Fetch_and_op(one, before, 1, counter)
            stream.synchronize()
            stream.begin_capture()
            for _ in range(FETCHES):
                win.Fetch_and_op(one, before, 1, counter)
            graph = stream.end_capture()
            fetch = (
                statistics.median(device_us(stream, lambda: graph.launch(stream), 5) for _ in range(ROUNDS)) / FETCHES
            )
            assert int(before[0]) == 6 * ROUNDS * FETCHES
            rows.append(("Fetch_and_op in a graph, us", fetch, "at most 5"))
            win.Unlock(1)
            stream.synchronize()
    comm.check()
    comm.Barrier()
    win.Free()
    return rows


def main() -> None:
    """Measure, and print the rows on rank 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        if comm.size != 2 or comm.device == "cpu":
            sys.exit("run it with 2 ranks on GPUs: mpirun -np 2 python -m mpi4py scripts/measuring/measure_windows.py")
        for name, value, beside in measure(comm):
            sys.stdout.write(f"{name:40} {value:10.2f}   ({beside})\n")


if __name__ == "__main__":
    main()
