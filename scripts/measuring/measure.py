"""Measure set-up and mapped memory: `mpirun -np N python scripts/measuring/measure.py [--json FILE]`.

Set-up: the slowest rank's milliseconds to create a communicator, its first array and its second array. The first
communicator of the process has a row, because on GPUs it creates the CUDA context. Other times are medians.

Memory of the next rank: every rank moves data there at once. On the host the data has 64 MiB. A rank puts it into
mapped memory, or sends it by MPI's Sendrecv into the same memory or into an ordinary array. It does so again with an
array that it computes first: in the next rank's memory, or in memory of this rank. On GPUs the data has 256 MiB, and a
rank puts it by each handle kind. The copy engine copies as much between the same two devices in one process.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from in_turns import in_turns
from mpi4py import MPI
from result_file import Sheet, measuring_parser

import mpicomm
from mpicomm.cli.arguments import processor

WORLD = MPI.COMM_WORLD
ROUNDS = 21
GROUP = "Mapped memory"


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
    """Return milliseconds of each step: the first time in this process, then the median of later times."""
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
    """Return GB/s to the next rank by each way; the ways take turns."""
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

        ways: dict[str, Callable[[], None]] = {
            "put": put,
            "Sendrecv into the same array": sendrecv,
            "Sendrecv into an ordinary array": sendrecv_elsewhere,
            "computed in the next rank's memory": compute_there,
            "computed, then Sendrecv": compute_and_sendrecv,
        }
        seconds = in_turns(ways, ROUNDS)
        compute_there()
        compute_and_sendrecv()
        if not np.array_equal(array.local, target):
            raise SystemExit("the two ways moved different bytes")
    return {way: nbytes / each / 1e9 for way, each in seconds.items()}


def device_ring(nbytes: int) -> list[list[Any]]:
    """Return for each handle kind GB/s of puts, GB/s of copies without handles, and why there are none."""
    import cupy

    with mpicomm.Communicator(WORLD) as comm:
        following, own = (comm.rank + 1) % comm.size, int(comm.device)
        devices = comm.allgather(own)
    source = cupy.random.default_rng(1 + WORLD.rank).integers(0, 256, nbytes, cupy.uint8)
    with cupy.cuda.Device(devices[following]):
        plain = cupy.empty(nbytes, cupy.uint8)
    note = None
    if devices[following] != own:
        if cupy.cuda.runtime.deviceCanAccessPeer(own, devices[following]):
            with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # enabled already
                cupy.cuda.runtime.deviceEnablePeerAccess(devices[following])
        else:
            note = "no peer access: the driver stages plain copies"
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

    rows: list[list[Any]] = []
    for kind in ("ipc", "fd", "fabric", "staged"):
        try:
            comm = mpicomm.Communicator(WORLD, handle=kind)
        except mpicomm.MpicommError as error:
            rows.append([f"`{kind}`", None, None, str(error)])
            continue
        with comm:
            array = comm.empty(nbytes, cupy.uint8)
            beside = rate(copy_plain)
            rows.append([f"`{kind}`", rate(lambda: array.put(source, following, stream=stream)), beside, note])  # noqa: B023
            WORLD.Barrier()
            if int(cupy.count_nonzero(array.peer(following) != source)):
                raise SystemExit(f"{kind}: wrong bytes arrived")
            WORLD.Barrier()
    return rows


def main() -> None:
    """Measure and print on rank 0; write the tables if a file is named."""
    options = measuring_parser(__doc__).parse_args()
    milliseconds = set_up()  # first of all: it times the first communicator of the process
    first, later = milliseconds["communicator"]
    arrays = [milliseconds[step][1] for step in ("first array", "second array")]
    with mpicomm.Communicator(WORLD) as comm:
        on_gpus = comm.device != "cpu"
        columns = ["step", f"{WORLD.size} ranks, {'GPUs' if on_gpus else 'cpu'}, `{comm.handle}`, ms"]
        with Sheet(comm, options, "Set-up", columns, group=GROUP, text="Each time is the slowest rank's.") as sheet:
            sheet.add("the first communicator" + ", with the CUDA context" * on_gpus, first)
            sheet.add("the next communicator", later)
            sheet.add("its first array, with the signal pads", arrays[0])
            sheet.add("its second array", arrays[1])
        rates = host_ring(64 << 20)
        text = "GB/s per rank. Every rank sends to the next rank at once."
        columns = ["host", "ranks", *rates]
        with Sheet(comm, options, "Host memory: 64 MiB to the next rank", columns, group=GROUP, text=text) as sheet:
            sheet.add(processor(), WORLD.size, *rates.values())
        if on_gpus:
            text = (
                "Every rank puts into the memory of the next rank at once. The copy engine makes the plain copy "
                "between the same two GPUs inside one process, in the same run."
            )
            columns = ["handle", "put, GB/s per rank", "plain copy, GB/s per rank", "note"]
            title = f"Puts of 256 MiB to the next rank, {WORLD.size} ranks"
            with Sheet(comm, options, title, columns, group=GROUP, text=text) as sheet:
                for row in device_ring(256 << 20):
                    sheet.add(*row)


main()
