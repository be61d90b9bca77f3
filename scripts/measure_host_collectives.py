"""Measure MPI against mapped memory on host arrays: `mpiexec -n N python scripts/measure_host_collectives.py`.

For each collective and size the script gives milliseconds of the slowest rank (the median of rounds in which the ways
take turns) by MPI and by the host engine, both ways where that has two, and how many times as fast as MPI each way is.
Sizes are those of a rank's largest buffer. Beside them stands a plain np.copyto of as many bytes on all ranks at once,
because memory can do no more. ``--slots 512x4,1024x4`` compares KiB per slot x slots; ``--kib 256,1024`` picks sizes;
``--only Allreduce`` picks collectives. ``--json FILE`` adds the rows to a result file.
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
from result_file import Table, add_tables, command, hardware

from mpicomm.cli.options import output_file, processor
from mpicomm.cluster.agreement import Group
from mpicomm.collectives import patterns
from mpicomm.collectives.board import Board
from mpicomm.collectives.exchange import Exchange
from mpicomm.collectives.host.engine import SLOT_NBYTES, SLOTS, HostEngine
from mpicomm.collectives.host.selection import piece_nbytes
from mpicomm.collectives.signature import Signature
from mpicomm.mpi.span import Span
from mpicomm.symmetric.owner import Shared

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.rank, WORLD.size
FLOAT32 = np.dtype(np.float32)
Ways = dict[str, Callable[[], object]]


class Buffers:
    """Arrays of one size, and the collectives on them."""

    def __init__(self, nbytes: int) -> None:
        count = nbytes // 4 // SIZE * SIZE
        rng = np.random.default_rng(RANK)
        self.send = rng.integers(-8, 8, count).astype(np.float32)  # sums are exact: MPI's order gives the same
        self.by_mpi, self.mapped = np.zeros_like(self.send), np.zeros_like(self.send)
        self.scratch = np.zeros_like(self.send)
        self.block = count // SIZE

    def mpi(self, name: str) -> Callable[[], object]:
        """Return MPI's call."""
        send, out, block = self.send, self.by_mpi, self.block
        calls: Ways = {
            "Allreduce": lambda: WORLD.Allreduce(send, out),
            "Reduce": lambda: WORLD.Reduce(send, out),
            "Reduce_scatter_block": lambda: WORLD.Reduce_scatter_block(send, out[:block]),
            "Scan": lambda: WORLD.Scan(send, out),
            "Exscan": lambda: WORLD.Exscan(send, out),
            "Allgather": lambda: WORLD.Allgather(send[:block], out),
            "Gather": lambda: WORLD.Gather(send[:block], out),
            "Scatter": lambda: WORLD.Scatter(send, out[:block]),
            "Alltoall": lambda: WORLD.Alltoall(send, out),
            "Bcast": lambda: WORLD.Bcast(send if RANK == 0 else out),
        }
        return calls[name]

    def exchanges(self, name: str) -> dict[str, Callable[[], list[Exchange]]]:
        """Return the exchanges of each way through mapped memory."""
        send, out = _span(self.send), _span(self.mapped)
        first = Span(out.pointer, self.block)
        send_blocks, blocks = self._blocks(self.send), self._blocks(self.mapped)
        at = (RANK, SIZE, FLOAT32)
        piece = piece_nbytes(name, self.send.nbytes, SIZE, forced=True)
        buffer = send if RANK == 0 else out
        ways: dict[str, dict[str, Callable[[], list[Exchange]]]] = {
            "Allreduce": {
                "one_shot": lambda: patterns.allreduce(*at, send, out, "sum"),
                "two_shot": lambda: patterns.allreduce(*at, send, out, "sum", piece_nbytes=piece),
            },
            "Reduce": {"mapped": lambda: patterns.reduce(*at, send, out, "sum", 0)},
            "Reduce_scatter_block": {"mapped": lambda: patterns.reduce_scatter(*at, send_blocks, first, "sum")},
            "Scan": {"mapped": lambda: patterns.scan(*at, send, out, "sum")},
            "Exscan": {"mapped": lambda: patterns.exscan(*at, send, out, "sum")},
            "Allgather": {"mapped": lambda: patterns.allgather(*at, send_blocks[0], blocks)},
            "Gather": {"mapped": lambda: patterns.gather(*at, send_blocks[0], blocks, 0)},
            "Scatter": {"mapped": lambda: patterns.scatter(*at, send_blocks, first, 0)},
            "Alltoall": {"mapped": lambda: patterns.alltoall(*at, send_blocks, blocks)},
            "Bcast": {
                "straight": lambda: patterns.bcast(*at, buffer, 0),
                "scatter_allgather": lambda: patterns.bcast(*at, buffer, 0, piece_nbytes=piece),
            },
        }
        return ways[name]

    def _blocks(self, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> list[Span]:
        starts = [index * self.block for index in range(SIZE)]
        return patterns.blocks(array.ctypes.data, [self.block] * SIZE, starts, 4)


def _span(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Span:
    return Span(array.ctypes.data, array.size)


def measure(ways: Ways, rounds: int) -> dict[str, float]:
    """Return the median of milliseconds of each way; they take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    order = list(ways)
    for _ in range(rounds + 1):
        order.append(order.pop(0))
        for name in order:
            work = ways[name]
            WORLD.Barrier()
            start = time.perf_counter()
            work()
            seconds[name].append(WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
    return {name: 1e3 * statistics.median(values[1:]) for name, values in seconds.items()}


def compare(name: str, nbytes: int, engines: dict[str, HostEngine], rounds: int) -> list[list[Any]]:
    """Measure one collective at one size, check that both paths agree, print a line, and return a row for each way."""
    buffers = Buffers(nbytes)
    signature = Signature(name, "float32", buffers.send.size)
    ways: Ways = {"MPI": buffers.mpi(name)}
    for label, engine in engines.items():
        for way, make in buffers.exchanges(name).items():
            ways[f"{way} {label}".strip()] = lambda engine=engine, make=make: engine.run(make(), signature)  # type: ignore[misc]
    ways["np.copyto"] = lambda: np.copyto(buffers.scratch, buffers.send)
    times = measure(ways, rounds)
    if not WORLD.allreduce(np.array_equal(buffers.by_mpi, buffers.mapped), MPI.LAND):
        raise SystemExit(f"{name}: MPI and mapped memory returned different values")
    if RANK == 0:
        ratios = "  ".join(f"{way} {value:8.3f} ({times['MPI'] / value:5.2f}x)" for way, value in times.items())
        sys.stdout.write(f"{name:21s}{nbytes >> 10:7d} KiB  {ratios}\n")
        sys.stdout.flush()
    own = {way: value for way, value in times.items() if way != "MPI"}
    return [
        [name, f"{nbytes >> 10} KiB", way, round(value, 3), round(times["MPI"], 3), round(times["MPI"] / value, 2)]
        for way, value in own.items()
    ]


def main() -> None:
    """Measure and print on rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kib", default="16,64,256,1024,4096,16384,65536")
    parser.add_argument("--slots", default="")
    parser.add_argument("--only", default="")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", type=output_file)
    options = parser.parse_args()
    node = Group(WORLD.Dup(), range(SIZE), 30.0)
    board = Board(node)
    pairs = [pair.split("x") for pair in options.slots.split(",") if pair]
    shapes = {f"{kib}Kx{slots}": (int(kib) << 10, int(slots)) for kib, slots in pairs} or {"": (SLOT_NBYTES, SLOTS)}
    engines = {
        label: HostEngine(node, board, slot_nbytes=nbytes, slots=slots) for label, (nbytes, slots) in shapes.items()
    }
    names = "Allreduce Reduce Reduce_scatter_block Scan Exscan Allgather Gather Scatter Alltoall Bcast"
    rows: list[list[Any]] = []
    for name in options.only.split(",") if options.only else names.split():
        for kib in options.kib.split(","):
            nbytes = int(kib) << 10
            rows += compare(name, nbytes, engines, options.rounds if nbytes > 1 << 20 else 5 * options.rounds)
    if RANK == 0 and options.json is not None:
        columns = ["collective", "size", "way", "this way, ms", "MPI, ms", "MPI's time by this way's"]
        title = f"Collectives on host arrays through mapped memory, {SIZE} ranks"
        text = "`np.copyto` copies as many bytes on all ranks at once."
        table = Table("Calls", title, hardware([], processor()), columns, rows, text=text, command=command(SIZE))
        add_tables(options.json, [table])
    parts: list[Shared] = [*engines.values(), board]
    for part in parts:
        part.close_peers()
        node.barrier("close")
        part.close_own()


main()
