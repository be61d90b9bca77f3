"""Measure epilogues against kernels behind the all-reduce, on GPUs: `mpirun -np 2 python scripts/measure_epilogues.py`.

For float32 and float16 arrays it times a CUDA graph of 20 all-reduces, each of them alone; with an epilogue; and with a
kernel of CuPy behind it that computes the same. It does so for ``v * scale + bias[i]``, and for a residual with an RMS
norm of rows of 4096, where CuPy takes several kernels. The median over 7 launches is printed, in microseconds for each
all-reduce, of the slowest rank. Results are compared before. Ranks that share a GPU take turns, so compare the columns,
not the times with those of other machines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from mpi4py import MPI
from result_file import Table, add_tables, command, hardware

import mpicomm
from mpicomm.cli.arguments import output_file
from mpicomm.cli.machine import processor
from mpicomm.cli.options import rank_record
from mpicomm.epilogues import rms_norm
from mpicomm.sizes import format_size

SIZES = (16 << 10, 256 << 10, 4 << 20, 64 << 20)
CALLS, ROUNDS = 20, 7
HIDDEN = 4096
SCALE = 0.5

_affine = cupy.ElementwiseKernel(
    "T v, T bias, float32 scale", "T out", "out = float(v) * scale + float(bias)", "affine"
)


def time_us(comm: mpicomm.Communicator, work: Callable[[], None]) -> float:
    """Return the microseconds of a call of ``work`` in a CUDA graph of many. Collective."""
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work()  # compiles, and sets up memory
        work()
        stream.synchronize()
        stream.begin_capture()
        for _ in range(CALLS):
            work()
        graph = stream.end_capture()
        graph.launch(stream)
        times = []
        for _ in range(ROUNDS):
            comm.Barrier(stream=stream)
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(stream)
            graph.launch(stream)
            end.record(stream)
            end.synchronize()
            times.append(1000 * cupy.cuda.get_elapsed_time(begin, end) / CALLS)
    comm.check()
    return float(max(comm.allgather(statistics.median(times))))


def require_close(got: Any, expected: Any) -> None:
    """Raise where an epilogue and CuPy differ by more than the rounding of a kernel of CuPy."""
    tolerance = 2e-2 if got.dtype == np.float16 else 1e-4
    if not bool(cupy.allclose(got, expected, rtol=tolerance, atol=tolerance)):
        raise SystemExit(f"results differ: {got[:4]} and {expected[:4]}")


def affine(comm: mpicomm.Communicator, x: Any) -> tuple[float, float, float]:
    """Return the times of an all-reduce alone, with an epilogue, and with a kernel behind."""
    y, z, bias = cupy.empty_like(x), cupy.empty_like(x), cupy.random.random(x.size).astype(x.dtype)

    def alone() -> None:
        comm.Allreduce(x, z)

    def fused() -> None:
        comm.Allreduce(x, y, epilogue="v * scale + bias[i]", scale=SCALE, bias=bias)

    def behind() -> None:
        comm.Allreduce(x, z)
        _affine(z, bias, np.float32(SCALE), z)

    fused()
    behind()
    comm.check()
    require_close(y, z)
    return time_us(comm, alone), time_us(comm, fused), time_us(comm, behind)


def norm(comm: mpicomm.Communicator, x: Any) -> tuple[float, float, float]:
    """As `affine`, for a residual and the norm of rows."""
    y, z, weight = cupy.empty_like(x), cupy.empty_like(x), cupy.random.random(HIDDEN).astype(x.dtype)
    residual = cupy.zeros_like(x)
    other = residual.copy()
    rows = other.reshape(-1, HIDDEN)

    def alone() -> None:
        comm.Allreduce(x, z)

    def fused() -> None:
        comm.Allreduce(x, y, epilogue=rms_norm(residual, weight))

    def behind() -> None:
        comm.Allreduce(x, z)
        cupy.add(other, z, out=other)
        squares = cupy.square(rows, dtype=cupy.float32).mean(axis=1, keepdims=True)
        cupy.multiply(rows * (1 / cupy.sqrt(squares + 1e-6)), weight, out=z.reshape(-1, HIDDEN), casting="unsafe")

    fused()
    behind()
    comm.check()
    require_close(y, z)
    return time_us(comm, alone), time_us(comm, fused), time_us(comm, behind)


def main() -> None:
    """Measure, print on rank 0, and write the table where a file is named."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    rows: list[list[Any]] = []
    with mpicomm.Communicator(MPI.COMM_WORLD) as comm:
        if comm.device == "cpu":
            raise SystemExit("there is no GPU: epilogues of host arrays are NumPy's")
        ranks = comm.gather(rank_record(comm.describe()))
        say = sys.stdout.write if comm.rank == 0 else lambda _: 0
        say(f"{'us, ' + str(comm.size) + ' ranks':>24} {'alone':>9} {'epilogue':>9} {'CuPy behind':>12}\n")
        for name, dtype in (("float32", cupy.float32), ("float16", cupy.float16)):
            for what, measure in (("affine", affine), ("norm", norm)):
                for nbytes in SIZES:
                    x = cupy.random.random(nbytes // np.dtype(dtype).itemsize).astype(dtype)
                    alone, fused, behind = measure(comm, x)
                    say(f"{name:>8} {what:>6} {format_size(nbytes):>8} {alone:9.2f} {fused:9.2f} {behind:12.2f}\n")
                    rows.append([name, what, format_size(nbytes), *(round(each, 2) for each in (alone, fused, behind))])
    if ranks is not None and options.json is not None:
        text = (
            "An all-reduce alone, with an epilogue, and with kernels of CuPy behind it that compute the same, in CUDA "
            f"graphs of {CALLS}: us for each, of the slowest rank. *affine* is `v * scale + bias[i]`, *norm* adds a "
            f"residual and normalises rows of {HIDDEN}."
        )
        columns = ["type", "epilogue", "size", "all-reduce alone", "with the epilogue", "CuPy behind"]
        title = f"Epilogues of all-reduces, {len(ranks)} ranks"
        where = hardware(ranks, processor())
        add_tables(options.json, [Table("Calls", title, where, columns, rows, text=text, command=command(len(ranks)))])


if __name__ == "__main__":
    main()
