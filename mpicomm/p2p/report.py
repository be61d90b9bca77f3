"""The matrices that p2p measures, the report of them (tables for people, and the JSON file), and the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from rich.progress import track

from mpicomm.cli import arguments
from mpicomm.devices.base import Link
from mpicomm.sizes import format_cell, rich_console, rich_table

NBYTES_ON_GPUS, NBYTES_ON_HOST = 256 << 20, 16 << 20
COPY_ENGINES, STORES, LOADS = "copy engines", "kernels that store", "kernels that load"
POISON = 0xA5
_SMALL_NBYTES = 16
_SMALL_COPIES = 100
_FILE_WIDTH = 1000  # wide enough to fold no cell, if no terminal sets the width

Cell = float | int | bool | str | None
"""None if there is nothing to measure, or if the driver gives no value."""
Transfer = tuple[int, int]
"""The GPU or rank with the data, and the one into whose memory they go."""


@dataclass(frozen=True)
class Matrix:
    """Cells by source and target. ``unit`` is "GB/s" or "us" for a measurement, and "" for an attribute."""

    title: str
    unit: str
    cells: list[list[Cell]]


class Pairs:
    """Measures all pairs of GPUs, or of ranks, pair by pair. A subclass moves the bytes and checks them."""

    ways: Mapping[str, bool]
    """The ways to move bytes; True if the target does the work, which means that it loads, else the source does."""
    small_ways: Sequence[str]
    """The ways for which small moves are timed."""

    def __init__(self, size: int, options: argparse.Namespace, *, shows: bool) -> None:
        self.size = size
        self.nbytes: int = options.bytes
        self.copies: int = options.iters
        self.rounds: int = options.rounds
        self.wrong = 0
        """The wrong bytes so far."""
        self._shows = shows

    def move_us(self, way: str, transfers: Sequence[Transfer], nbytes: int, copies: int) -> float | None:
        """Return the time of ``copies`` copies of each transfer, side by side: the median of the rounds.

        Return None if one has no access to the other. Count wrong bytes.
        """
        raise NotImplementedError

    def load_us(self, source: int, target: int) -> float | None:
        """Return the time in which a kernel of ``target`` loads a word of ``source``; None on the host."""
        return None

    def matrices(self) -> Iterator[Matrix]:
        """Measure bandwidths, then latencies."""
        for title, both in (("one way", False), ("both ways", True)):
            for way in self.ways:
                if self.size > 1 or not both:
                    yield self._matrix(f"Bandwidth, {title}, {way}", "GB/s", partial(self._bandwidth, way, both))
        for way in self.small_ways:
            yield self._matrix(f"Latency, {way} of {_SMALL_NBYTES} bytes", "us", partial(self._small_us, way))
        if LOADS in self.ways:
            yield self._matrix("Latency, a kernel's load", "us", self.load_us)

    def _matrix(self, title: str, unit: str, cell: Callable[[int, int], Cell]) -> Matrix:
        numbers = range(self.size)
        hidden = not (self._shows and sys.stdout.isatty())
        rows = track(numbers, title, transient=True, disable=hidden)
        return Matrix(title, unit, [[cell(source, target) for target in numbers] for source in rows])

    def _bandwidth(self, way: str, both: bool, source: int, target: int) -> Cell:
        if both and source == target:
            return None
        transfers = [(source, target), (target, source)][: 2 if both else 1]
        time_us = self.move_us(way, transfers, self.nbytes, self.copies)
        return None if time_us is None else len(transfers) * self.copies * self.nbytes / time_us * 1e-3

    def _small_us(self, way: str, source: int, target: int) -> Cell:
        time_us = self.move_us(way, [(source, target)], min(_SMALL_NBYTES, self.nbytes), _SMALL_COPIES)
        return None if time_us is None else time_us / _SMALL_COPIES


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


def report(end: str, lines: Iterable[str], matrices: Iterable[Matrix], *, shows: bool = True) -> list[Matrix]:
    """Print lines, and each matrix as soon as it is measured. Return the matrices. ``end`` is "GPU" or "rank"."""
    console, done = rich_console(sys.stdout, _FILE_WIDTH), []
    console.quiet = not shows
    for line in lines:
        console.print(line, soft_wrap=True)
    for matrix in matrices:
        done.append(matrix)
        # This is not the title of `Table`, because `Table` folds its title to its width.
        console.print(f"{matrix.title} ({matrix.unit})" if matrix.unit else matrix.title)
        # An attribute says how a GPU accesses another one. A measurement says how fast data goes to the other one.
        corner = f"from {end} \\ to {end}" if matrix.unit else f"{end} \\ peer"
        numbers = [str(number) for number in range(len(matrix.cells))]
        rows = ([number, *map(format_cell, row)] for number, row in zip(numbers, matrix.cells, strict=True))
        console.print(rich_table(None, [corner, *numbers], rows, right=numbers))
    return done


def record(matrices: Sequence[Matrix], wrong: int) -> dict[str, Any]:
    """Return the results for the JSON file."""
    return {"matrices": [asdict(matrix) for matrix in matrices], "wrong": wrong, "ok": wrong == 0}


def ending(wrong: int) -> list[str]:
    """Return the lines below the matrices, the last of which says how the run ended."""
    return [
        "Bandwidth counts each byte once; within one memory it is read and written there.",
        "Latency of copies: the mean time of many in a row.",
        "Latency of a load: the mean time of many loads that wait for each other.",
        "-: there is nothing to measure, or no peer access.",
        "OK" if wrong == 0 else f"FAILED: {wrong} wrong bytes",
    ]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "p2p",
        "Measure bandwidth and latency between each two GPUs of this machine, by copy engines and by "
        "kernels, with peer access and through host memory, and check every byte. If mpirun starts several ranks, "
        "measure between each two ranks, on GPUs or on the host, through the memory that they open for each other.",
    )
    count = arguments.count_from
    result.add_argument(
        "-b", "--bytes", type=arguments.parse_size, metavar="SIZE", help="of a copy; default: 256M, 16M on the host"
    )
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    result.add_argument("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    return result
