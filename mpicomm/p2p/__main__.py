"""``python -m mpicomm.p2p``: the speed of writes and reads of other ranks' memory, by each method."""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import Call, machine_of
from mpicomm.bench.operations import POISON, Content
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.kernels.reductions import options_for
from mpicomm.kernels.variant import Variant, u64
from mpicomm.sizes import format_cell, rich_console, rich_table

COPY_ENGINES, STORES, LOADS = "copy engines", "kernels that store", "kernels that load"
COPY_THREADS = 512
_BLOCKS = 4  # on each multiprocessor, so that it has as many threads as it holds
COPY = Variant(Path(__file__).with_name("p2p.cu"), "mpicomm_p2p_copy", options_for(None))
_SMALL_NBYTES = 16
_SMALL_COPIES = 100


class Copying(ctypes.Structure):
    """The host's copy of ``Copying`` in p2p.cu."""

    _fields_ = [*u64("target", "source", "nbytes")]


class Pairs:
    """Measures all pairs of ranks, pair by pair, and checks the bytes. All methods but `copy` are collective.

    ``methods`` are the ways to move bytes; True if the target does the work, which means that it loads, else the source
    does.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self._comm, self._options = comm, options
        self.wrong = 0
        """The wrong bytes so far."""
        self._data, self._window = comm.empty(options.bytes, np.uint8), comm.empty(options.bytes, np.uint8)
        self._machine = machine_of(comm)
        if comm.device == "cpu":
            self.methods = {"copies to the target": False, "copies from the source": True}
        else:
            import cupy  # not above, because ranks on the cpu have no CuPy

            from mpicomm.devices.cuda.driver import visible_devices
            from mpicomm.devices.cuda.load import kernels_of

            self.methods = {COPY_ENGINES: False, STORES: False, LOADS: True}
            self._kernel = kernels_of(visible_devices()[int(comm.device)]).load(COPY)
            self._blocks = _BLOCKS * cupy.cuda.Device().attributes["MultiProcessorCount"]
        self._content = Content(self._machine.xp, np.dtype(np.uint8), "sum", comm.size, options.bytes, reduces=False)
        self._content.write(self._data.local, comm.rank)

    def matrices(self) -> Iterator[tuple[str, str, Callable[[int, int], float | None]]]:
        """Yield the title of each matrix, its unit, and a function that measures from a source to a target.

        The function returns None if there is nothing to measure.
        """
        for how, both in (("one way", False), ("both ways", True)):
            for method in self.methods:
                if self._comm.size > 1 or not both:
                    yield f"Bandwidth, {how}, {method}", "GB/s", partial(self._bandwidth, method, both)
        for method in self.methods if self._comm.device == "cpu" else (COPY_ENGINES,):
            yield f"Latency, {method} of {_SMALL_NBYTES} bytes", "us", partial(self._small_us, method)

    def move_us(self, method: str, transfers: Sequence[tuple[int, int]], nbytes: int, copies: int) -> float:
        """Return the time of ``copies`` copies of each transfer, side by side: the median of the rounds.

        A transfer has a source and a target. Count wrong bytes.
        """
        rank, by_target = self._comm.rank, self.methods[method]
        source = next((source for source, target in transfers if target == rank), None)
        peer = next((pair[not by_target] for pair in transfers if pair[by_target] == rank), None)
        window = self._window.local[:nbytes]
        if source is not None:
            window.fill(POISON)
        self._check_and_wait()
        times: list[float] = []
        if peer is not None:
            machine, copy = self._machine, self.copy(method, peer, nbytes)
            machine.time_calls(copy, 1)  # warms up
            # Ranks do not meet in a graph of copies. The timed launch follows one of the same length, so that the peer
            # moves its bytes meanwhile.
            graph = machine.capture(copy, copies)
            for _ in range(self._options.rounds):
                if len(transfers) == 2:  # the peer moves bytes, too
                    self._comm.sendrecv(None, peer, source=peer)
                took = machine.time_calls(copy, copies) if graph is None else machine.time_graph(graph)
                times.append(took.complete * copies * 1e6)
        self._check_and_wait()
        wrong = 0 if source is None else self._content.count_differing(window, source)
        results: list[tuple[list[float], int]] = self._comm.allgather((times, wrong))
        self.wrong += sum(of_rank[1] for of_rank in results)
        slowest: list[float] = [max(rounds) for rounds in zip(*(found for found, _ in results if found), strict=True)]
        return statistics.median(slowest)

    def copy(self, method: str, peer: int, nbytes: int) -> Call:
        """Return a call that copies this rank's bytes to a peer, or the peer's bytes to this rank. Local."""
        to, from_ = self._window.peer(peer), self._data.local
        if self.methods[method]:
            to, from_ = self._window.local, self._data.peer(peer)
        to, from_ = to[:nbytes], from_[:nbytes]
        if self._comm.device == "cpu":
            return lambda: np.copyto(to, from_)
        if method == COPY_ENGINES:
            return lambda: self._window.put(from_, peer, stream=self._machine.stream)
        stream, copying = self._machine.stream.ptr, Copying(to.data.ptr, from_.data.ptr, nbytes)
        return lambda: self._kernel.launch_structure(stream, copying, blocks=self._blocks, threads=COPY_THREADS)

    def _bandwidth(self, method: str, both: bool, source: int, target: int) -> float | None:
        if both and source == target:
            return None
        transfers = [(source, target), (target, source)][: 2 if both else 1]
        copies: int = self._options.iters
        nbytes: int = self._options.bytes
        return len(transfers) * copies * nbytes / self.move_us(method, transfers, nbytes, copies) * 1e-3

    def _small_us(self, method: str, source: int, target: int) -> float:
        nbytes = min(_SMALL_NBYTES, self._options.bytes)
        return self.move_us(method, [(source, target)], nbytes, _SMALL_COPIES) / _SMALL_COPIES

    def _check_and_wait(self) -> None:
        self._comm.check()
        self._comm.barrier()


_EXPLAINED = (
    "Bandwidth counts each byte once; within one memory it is read and written there.",
    "Latency: the mean time of many copies in a row.",
    "On GPUs the copies of a round are a CUDA graph.",
    "-: there is nothing to measure.",
)


def main() -> int:
    """Run the command line on this rank. Collective."""
    parser = arguments.command_parser(
        "p2p",
        "Measure bandwidth and latency between each two ranks, through the memory that they open for each other: by "
        "copy engines and by kernels on GPUs, by copies on the host. Every byte is checked.",
    )
    add, count, nbytes = parser.add_argument, arguments.count_from, arguments.parse_size
    add("-b", "--bytes", type=nbytes, metavar="SIZE", help="of a copy; default: 256M, 16M on the host")
    add("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    add("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    run = command_line.Run(parser, one_node=True)
    options, comm = run.options, run.comm
    options.bytes = options.bytes or (16 << 20 if comm.device == "cpu" else 256 << 20)
    run.print_header("p2p", *_EXPLAINED)
    console, numbers, matrices = rich_console(sys.stdout), range(comm.size), []
    console.quiet = comm.rank != 0
    columns = [str(number) for number in numbers]
    pairs = Pairs(comm, options)
    for title, unit, measure in pairs.matrices():
        tracked = command_line.tracked(numbers, title)
        cells = [[measure(source, target) for target in numbers] for source in tracked]
        matrices.append({"title": title, "unit": unit, "cells": cells})
        # This is not the title of `Table`, because `Table` folds its title to its width.
        console.print(f"{title} ({unit})")
        rows = ([number, *map(format_cell, row)] for number, row in zip(columns, cells, strict=True))
        console.print(rich_table(None, ["from rank \\ to rank", *columns], rows, right=columns))
    return run.finish({"matrices": matrices}, pairs.wrong)


if __name__ == "__main__":
    command_line.run(main)
