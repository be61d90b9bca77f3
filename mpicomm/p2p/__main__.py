"""``python -m mpicomm.p2p``: the speed of writes and reads of other ranks' memory, by each way to move bytes."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain

import numpy as np

from mpicomm.api.communicator import Communicator
from mpicomm.bench.measure import Call, machine_of
from mpicomm.bench.operations import Content
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.devices.base import Link
from mpicomm.sizes import format_cell, rich_console, rich_table

COPY_ENGINES, STORES, LOADS = "copy engines", "kernels that store", "kernels that load"
_SMALL_NBYTES = 16
_SMALL_COPIES = 100

Cell = float | int | bool | str | None
"""None if there is nothing to measure, or if the driver gives no value."""
Transfer = tuple[int, int]
"""The rank with the data, and the rank into whose memory they go."""


@dataclass(frozen=True)
class Matrix:
    """Cells by source and target. ``unit`` is "GB/s" or "us" for a measurement, and "" for an attribute."""

    title: str
    unit: str
    cells: list[list[Cell]]


def link_matrices(links: Sequence[Sequence[Link]]) -> list[Matrix]:
    """Return the matrices of links: the path, and CUDA's attributes if there are any."""
    titles = {
        "path": "path to memory",
        "access": "peer access",
        "performance_rank": "performance rank (0 is the fastest)",
        "native_atomics": "native atomics",
    }
    matrices = [
        Matrix(title, "", [[getattr(link, name) for link in row] for row in links]) for name, title in titles.items()
    ]
    return [each for each in matrices if any(cell is not None for row in each.cells for cell in row)]


class Pairs:
    """Measures all pairs of ranks, pair by pair, and checks the bytes. All methods but `copy` are collective.

    ``ways`` are the ways to move bytes; True if the target does the work, which means that it loads, else the source
    does.
    """

    def __init__(self, comm: Communicator, options: argparse.Namespace) -> None:
        self._comm, self._options = comm, options
        self.wrong = 0
        """The wrong bytes so far."""
        self._data, self._window = comm.empty(options.bytes, np.uint8), comm.empty(options.bytes, np.uint8)
        self._machine = machine_of(comm)
        if comm.device == "cpu":
            self.ways = {"copies to the target": False, "copies from the source": True}
        else:
            from mpicomm.devices.cuda.driver import visible_devices
            from mpicomm.p2p.gpu import copier

            self.ways = {COPY_ENGINES: False, STORES: False, LOADS: True}
            self._by_kernel = copier(visible_devices()[int(comm.device)], self._machine.stream.ptr)
        self._content = Content(self._machine.xp, np.dtype(np.uint8), "sum", comm.size, options.bytes, reduces=False)
        self._content.write(self._data.local, comm.rank)

    def matrices(self) -> Iterator[Matrix]:
        """Measure bandwidths, then latencies."""
        for title, both in (("one way", False), ("both ways", True)):
            for way in self.ways:
                if self._comm.size > 1 or not both:
                    yield self._matrix(f"Bandwidth, {title}, {way}", "GB/s", partial(self._bandwidth, way, both))
        for way in self.ways if self._comm.device == "cpu" else (COPY_ENGINES,):
            yield self._matrix(f"Latency, {way} of {_SMALL_NBYTES} bytes", "us", partial(self._small_us, way))

    def move_us(self, way: str, transfers: Sequence[Transfer], nbytes: int, copies: int) -> float:
        """Return the time of ``copies`` copies of each transfer, side by side: the median of the rounds.

        Count wrong bytes.
        """
        rank, by_target = self._comm.rank, self.ways[way]
        source = next((source for source, target in transfers if target == rank), None)
        peer = next((pair[not by_target] for pair in transfers if pair[by_target] == rank), None)
        window = self._window.local[:nbytes]
        if source is not None:
            self._content.poison(window)
        self._meet()
        times: list[float] = []
        if peer is not None:
            machine, copy = self._machine, self.copy(way, peer, nbytes)
            machine.time_calls(copy, 1)  # warms up
            # Ranks do not meet in a graph of copies. The timed launch follows one of the same length, so that the peer
            # moves its bytes meanwhile.
            graph = machine.capture(copy, copies)
            for _ in range(self._options.rounds):
                if len(transfers) == 2:  # the peer moves bytes, too
                    self._comm.sendrecv(None, peer, source=peer)
                took = machine.time_calls(copy, copies) if graph is None else machine.time_graph(graph)
                times.append(took.complete * copies * 1e6)
        self._meet()
        wrong = 0 if source is None else self._content.count_differing(window, source)
        results: list[tuple[list[float], int]] = self._comm.allgather((times, wrong))
        self.wrong += sum(of_rank[1] for of_rank in results)
        slowest: list[float] = [max(rounds) for rounds in zip(*(found for found, _ in results if found), strict=True)]
        return statistics.median(slowest)

    def copy(self, way: str, peer: int, nbytes: int) -> Call:
        """Return a call that copies this rank's bytes to a peer, or the peer's bytes to this rank. Local."""
        to, from_ = self._window.peer(peer), self._data.local
        if self.ways[way]:
            to, from_ = self._window.local, self._data.peer(peer)
        to, from_ = to[:nbytes], from_[:nbytes]
        if self._comm.device == "cpu":
            return lambda: np.copyto(to, from_)
        if way == COPY_ENGINES:
            return lambda: self._window.put(from_, peer, stream=self._machine.stream)
        return lambda: self._by_kernel(to.data.ptr, from_.data.ptr, nbytes)

    def _matrix(self, title: str, unit: str, cell: Callable[[int, int], Cell]) -> Matrix:
        numbers = range(self._comm.size)
        rows = command_line.tracked(numbers, title)
        return Matrix(title, unit, [[cell(source, target) for target in numbers] for source in rows])

    def _bandwidth(self, way: str, both: bool, source: int, target: int) -> Cell:
        if both and source == target:
            return None
        transfers = [(source, target), (target, source)][: 2 if both else 1]
        copies: int = self._options.iters
        nbytes: int = self._options.bytes
        return len(transfers) * copies * nbytes / self.move_us(way, transfers, nbytes, copies) * 1e-3

    def _small_us(self, way: str, source: int, target: int) -> Cell:
        nbytes = min(_SMALL_NBYTES, self._options.bytes)
        return self.move_us(way, [(source, target)], nbytes, _SMALL_COPIES) / _SMALL_COPIES

    def _meet(self) -> None:
        """Wait for the work of all ranks."""
        self._comm.check()
        self._comm.barrier()


_FILE_WIDTH = 1000  # wide enough to fold no cell, if no terminal sets the width
_EXPLAINED = (
    "Bandwidth counts each byte once; within one memory it is read and written there.",
    "Latency: the mean time of many copies in a row.",
    "On GPUs the copies of a round are a CUDA graph.",
    "-: there is nothing to measure.",
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "p2p",
        "Measure bandwidth and latency between each two ranks, through the memory that they open for each other: by "
        "copy engines and by kernels on GPUs, by copies on the host. Every byte is checked.",
    )
    count = arguments.count_from
    result.add_argument(
        "-b", "--bytes", type=arguments.parse_size, metavar="SIZE", help="of a copy; default: 256M, 16M on the host"
    )
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    result.add_argument("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    return result


def report(matrices: Iterable[Matrix], *, shows: bool) -> list[Matrix]:
    """Print each matrix as soon as it is measured. Return the matrices."""
    console, done = rich_console(sys.stdout, _FILE_WIDTH), []
    console.quiet = not shows
    for matrix in matrices:
        done.append(matrix)
        # This is not the title of `Table`, because `Table` folds its title to its width.
        console.print(f"{matrix.title} ({matrix.unit})" if matrix.unit else matrix.title)
        # An attribute says how a rank accesses another one. A measurement says how fast data goes to the other one.
        corner = "from rank \\ to rank" if matrix.unit else "rank \\ peer"
        numbers = [str(number) for number in range(len(matrix.cells))]
        rows = ([number, *map(format_cell, row)] for number, row in zip(numbers, matrix.cells, strict=True))
        console.print(rich_table(None, [corner, *numbers], rows, right=numbers))
    return done


def main() -> int:
    """Run the command line on this rank. Collective."""
    run = command_line.Run(parser(), one_node="the matrices are of mapped memory and need all ranks on one node")
    options, comm = run.options, run.comm
    options.bytes = options.bytes or (16 << 20 if comm.device == "cpu" else 256 << 20)
    run.introduce("p2p", *_EXPLAINED)
    pairs = Pairs(comm, options)
    matrices = chain(link_matrices([info.links for info in run.ranks]), pairs.matrices())
    measured = report(matrices, shows=comm.rank == 0)
    return run.finish({"matrices": [asdict(matrix) for matrix in measured]}, pairs.wrong, "wrong bytes")


if __name__ == "__main__":
    command_line.run(main)
