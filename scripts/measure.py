"""Measure what the README quotes of set-up and of mapped memory: `mpirun -np N python scripts/measure.py [FILE]`.

Set-up: milliseconds to create a communicator, a first and a second array (slowest rank; the first creation in the
process, which on GPUs includes the CUDA context, and the median of later ones).
Ring, every rank to the next at once, GB/s per rank at 64 MiB (host) or 256 MiB (GPU): on the host, a put into the next
rank's mapped memory, MPI's Sendrecv into the same memory and into an ordinary array, and the same for an array that is
computed on the way (straight into the next rank's memory, or computed and then sent); on GPUs, a put for each handle
kind beside plain copy-engine copies between the same two devices, made in one process without any handle.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpicomm

WORLD = MPI.COMM_WORLD
ROUNDS = 21


def slowest(seconds: float) -> float:
    """Return the longest time any rank took."""
    longest: float = WORLD.allreduce(seconds, MPI.MAX)
    return longest


def timed(work: Callable[[], object]) -> float:
    """Return the seconds the slowest rank took for ``work``."""
    WORLD.Barrier()
    start = time.perf_counter()
    work()
    return slowest(time.perf_counter() - start)


def set_up() -> dict[str, list[float]]:
    """Return milliseconds per step: the first time in this process, then the median of later times."""
    times: dict[str, list[float]] = {"communicator": [], "first array": [], "second array": []}
    for _ in range(ROUNDS):
        made: list[Any] = []
        times["communicator"].append(timed(lambda: made.append(mpicomm.Communicator(WORLD))))  # noqa: B023
        comm = made[0]
        times["first array"].append(timed(lambda: comm.empty(1 << 20, np.uint8)))  # noqa: B023
        times["second array"].append(timed(lambda: comm.empty(1 << 20, np.uint8)))  # noqa: B023
        comm.Free()
    return {step: [1e3 * values[0], 1e3 * statistics.median(values[1:])] for step, values in times.items()}


def host_ring(nbytes: int) -> dict[str, float]:
    """Return GB/s to the next rank, rounds interleaved: of data that exists, and of results as they are computed."""
    with mpicomm.Communicator(WORLD, device="cpu") as comm:
        following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        source = np.random.default_rng(comm.rank).random(nbytes // 4, np.float32)
        scratch, target = np.empty_like(source), np.empty_like(source)
        array = comm.empty(source.shape, source.dtype)

        def hand_over() -> None:
            array.signal(following)
            array.wait_signal(previous)

        def put() -> None:
            array.put(source, following)
            hand_over()

        def sendrecv() -> None:
            WORLD.Sendrecv(source, following, recvbuf=array.local, source=previous)

        def sendrecv_elsewhere() -> None:
            WORLD.Sendrecv(source, following, recvbuf=target, source=previous)

        def compute_there() -> None:
            np.sqrt(source, out=array.peer(following))
            hand_over()

        def compute_and_sendrecv() -> None:
            np.sqrt(source, out=scratch)
            WORLD.Sendrecv(scratch, following, recvbuf=target, source=previous)

        ways: list[Callable[[], None]] = [put, sendrecv, sendrecv_elsewhere, compute_there, compute_and_sendrecv]
        times: dict[str, list[float]] = {way.__name__: [] for way in ways}
        for _ in range(ROUNDS):
            for way in ways:
                times[way.__name__].append(timed(way))
        if not np.array_equal(array.local, target):
            raise SystemExit("the two ways moved different bytes")
    return {way: nbytes / statistics.median(values[1:]) / 1e9 for way, values in times.items()}


def device_ring(nbytes: int) -> dict[str, float | str]:
    """Return GB/s of a put for each handle kind, and of copies between the same devices without any handle."""
    import cupy

    rates: dict[str, float | str] = {}
    with mpicomm.Communicator(WORLD) as comm:
        following, own = (comm.rank + 1) % comm.size, int(comm.device)
        devices = comm.allgather(own)
    source = cupy.random.default_rng(comm_seed()).integers(0, 256, nbytes, cupy.uint8)
    with cupy.cuda.Device(devices[following]):
        plain = cupy.empty(nbytes, cupy.uint8)
    if devices[following] != own:
        if cupy.cuda.runtime.deviceCanAccessPeer(own, devices[following]):
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # enabled already
                cupy.cuda.runtime.deviceEnablePeerAccess(devices[following])
        else:
            rates["note"] = "no peer access: plain copies are staged by the driver"
    stream = cupy.cuda.Stream(non_blocking=True)

    def copy_plain() -> None:
        runtime = cupy.cuda.runtime
        runtime.memcpyPeerAsync(plain.data.ptr, devices[following], source.data.ptr, own, nbytes, stream.ptr)

    def rate(copy: Callable[[], object]) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        seconds = []
        for _ in range(ROUNDS):
            WORLD.Barrier()
            start.record(stream)
            for _ in range(10):
                copy()
            stop.record(stream)
            stop.synchronize()
            seconds.append(slowest(cupy.cuda.get_elapsed_time(start, stop) / 10e3))
        return nbytes / statistics.median(seconds[1:]) / 1e9

    for kind in ("ipc", "fd", "fabric", "staged"):
        try:
            comm = mpicomm.Communicator(WORLD, handle=kind)
        except mpicomm.MpicommError as error:
            rates[kind] = str(error)
            continue
        with comm:
            array = comm.empty(nbytes, cupy.uint8)
            rates[f"plain copies beside {kind}"] = rate(copy_plain)
            rates[kind] = rate(lambda: array.put(source, following, stream=stream))  # noqa: B023
            WORLD.Barrier()
            if int(cupy.count_nonzero(array.peer(following) != source)):
                raise SystemExit(f"{kind}: wrong bytes arrived")
            WORLD.Barrier()
    return rates


def comm_seed() -> int:
    """Return a seed that differs between ranks."""
    return 1 + WORLD.rank


def main() -> None:
    """Measure and print on rank 0; write JSON where a file is named."""
    results: dict[str, Any] = {"ranks": WORLD.size, "set_up_ms": set_up()}
    with mpicomm.Communicator(WORLD) as comm:
        on_gpu = comm.device != "cpu"
        results["device"] = comm.describe().device_name
        results["handle"] = comm.handle
    results["host_ring_64MiB_GBps"] = host_ring(64 << 20)
    if on_gpu:
        results["device_ring_256MiB_GBps"] = device_ring(256 << 20)
    if WORLD.rank == 0:
        text = json.dumps(results, indent=2)
        sys.stdout.write(text + "\n")
        if len(sys.argv) > 1:
            Path(sys.argv[1]).write_text(text + "\n")


main()
