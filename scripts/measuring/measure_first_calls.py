"""Measure a program's first calls: `mpirun -np N python scripts/measuring/measure_first_calls.py`.

Each process starts anew, so one run is one sample. Each time is the slowest rank's, in milliseconds, until the GPU has
finished. Device memory is what the GPU of rank 0 lost, for each rank that uses it. ``--nccl`` measures NCCL in place of
mpicomm, which needs a GPU for each rank. Kernels are compiled, too, if XDG_CACHE_HOME and CUDA_CACHE_PATH name empty
directories: NVRTC from CUDA 13 on has a cache of its own. Modules have to be compiled already, so run it twice.

``--spans MS`` prints where rank 0 spent at least MS milliseconds, as a tree of Python calls, which takes time itself.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

MIB = 1 << 20


class Spans:
    """The Python calls of a thread that take long, as a tree."""

    def __init__(self, least_ms: float) -> None:
        self.lines: list[str] = []
        self._least_ms = least_ms
        self._open: list[tuple[float, int, str]] = []

    def around(self, name: str, work: Callable[[], Any]) -> Any:
        """Do some work, and return its result."""
        self.lines.append(name)
        sys.setprofile(self._event)
        try:
            return work()
        finally:
            sys.setprofile(None)
            self._open.clear()

    def _event(self, frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if "importlib" in code.co_filename:
            return
        if event == "call":
            name = f"{'/'.join(code.co_filename.split('/')[-3:])}:{code.co_name}"
            if code.co_name == "call":  # of the driver
                name += f"({getattr(frame.f_locals.get('function'), '__name__', '')})"
            self._open.append((time.perf_counter(), len(self.lines), name))
        elif event == "return" and self._open:
            begin, place, name = self._open.pop()
            spent = 1e3 * (time.perf_counter() - begin)
            if spent >= self._least_ms:
                self.lines.insert(place, f"{spent:9.2f} {'  ' * len(self._open)}{name}")


class Steps:
    """The steps of this rank so far: milliseconds, and the bytes of device memory after each."""

    def __init__(self, least_ms: float | None) -> None:
        self.spans = None if least_ms is None else Spans(least_ms)
        self.times: dict[str, float] = {}
        self.memory: dict[str, int] = {}
        self.cupy: Any = None
        """CuPy, after it has a context; None without a GPU."""

    def local(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a step in which no rank waits for another one."""
        begin = time.perf_counter()
        result = work() if self.spans is None else self.spans.around(name, work)
        if self.cupy is not None:
            self.cupy.cuda.Device().synchronize()
        self.times[name] = 1e3 * (time.perf_counter() - begin)
        return result

    def together(self, name: str, work: Callable[[], Any]) -> Any:
        """Do a step that all ranks begin at once."""
        from mpi4py import MPI

        MPI.COMM_WORLD.Barrier()
        result = self.local(name, work)
        MPI.COMM_WORLD.Barrier()
        if self.cupy is not None:
            self.note_memory(name)
        return result

    def note_memory(self, name: str) -> None:
        """Note the memory of the device that is in use."""
        free, total = self.cupy.cuda.runtime.memGetInfo()
        self.memory[name] = total - free


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nccl", action="store_true", help="measure NCCL in place of mpicomm")
    parser.add_argument("--spans", type=float, metavar="MS", help="print the calls that take at least MS milliseconds")
    options = parser.parse_args()
    steps = Steps(options.spans)
    xp: Any = steps.local("import numpy", lambda: importlib.import_module("numpy"))
    mpi = steps.local("import mpi4py.MPI", lambda: importlib.import_module("mpi4py.MPI"))
    world = mpi.COMM_WORLD
    sharing = world.size  # the ranks of a GPU
    with contextlib.suppress(ImportError):
        cupy = steps.local("import cupy", lambda: importlib.import_module("cupy"))
        with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # no GPU
            sharing = -(-world.size // cupy.cuda.runtime.getDeviceCount())
            steps.local("CUDA context", cupy.cuda.Device(world.rank // sharing).use)
            xp = steps.cupy = cupy
    mpicomm = steps.local("import mpicomm", lambda: importlib.import_module("mpicomm"))
    small = [xp.ones(MIB // 4, "f4") for _ in range(2)]
    large = [xp.ones(64 * MIB // 4, "f4") for _ in range(2)]
    gathered = xp.ones((world.size, MIB // 4), "f4")
    if steps.cupy is not None:
        float(large[0][0] + large[1][0])  # with CuPy's own kernels
        world.Barrier()  # ranks may share the GPU
        steps.note_memory("")
    if options.nccl:
        measure_nccl(steps, world, small, gathered, large)
    else:
        comm = steps.together("Communicator", lambda: mpicomm.Communicator(world))
        for again in ("", " again"):
            steps.together("Allreduce 1 MiB" + again, lambda: comm.Allreduce(*small))
            steps.together("Bcast 1 MiB" + again, lambda: comm.Bcast(small[0]))
            steps.together("Allgather 1 MiB" + again, lambda: comm.Allgather(small[0], gathered))
            steps.together("Allreduce 64 MiB" + again, lambda: comm.Allreduce(*large))
    assert float(large[1][-1]) == world.size
    slowest = {name: world.reduce(spent, mpi.MAX) for name, spent in steps.times.items()}
    uses = [] if options.nccl else comm.describe().memory
    if world.rank == 0:
        report(slowest, list(steps.memory.items()), sharing)
        lines = [f"    {use.purpose}: {use.device_nbytes / MIB:.2f} MiB" for use in uses if use.device_nbytes]
        lines += [] if steps.spans is None else steps.spans.lines
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    if options.nccl:
        world.Barrier()
        os._exit(0)  # its teardown is not measured


def measure_nccl(steps: Steps, world: Any, small: list[Any], gathered: Any, large: list[Any]) -> None:
    """Make a communicator of NCCL, and call it as the Communicator is called."""
    from mpicomm.devices.cuda import nccl

    steps.local("load NCCL", nccl.load)
    identity = world.bcast(nccl.unique_id() if world.rank == 0 else None)
    comm = steps.together("Communicator", lambda: nccl.NcclCommunicator(world.size, identity, world.rank))
    of_float, of_sum = 7, 0
    calls: list[tuple[str, str, list[Any], list[int]]] = [
        ("Allreduce 1 MiB", "ncclAllReduce", small, [of_float, of_sum]),
        ("Bcast 1 MiB", "ncclBroadcast", [small[0], small[0]], [of_float, 0]),
        ("Allgather 1 MiB", "ncclAllGather", [small[0], gathered], [of_float]),
        ("Allreduce 64 MiB", "ncclAllReduce", large, [of_float, of_sum]),
    ]
    for again in ("", " again"):
        for name, function, arrays, numbers in calls:
            pointers = [array.data.ptr for array in arrays]
            passed = [*pointers, arrays[0].size, *numbers, comm.handle, 0]
            steps.together(name + again, partial(nccl.call, function, *passed))


def report(slowest: dict[str, float], memory: list[tuple[str, int]], sharing: int) -> None:
    """Print the time of each step, and the device memory that it took."""
    taken = {name: (after - before) / sharing / MIB for (_, before), (name, after) in pairwise(memory)}
    lines = [
        f"{name:20} {spent:9.2f} ms" + (f" {taken[name]:8.1f} MiB" if name in taken else "")
        for name, spent in slowest.items()
    ]
    if taken:
        lines.append(f"all device memory: {sum(taken.values()):.1f} MiB")
    sys.stdout.write("".join(f"{line}\n" for line in lines))


main()
