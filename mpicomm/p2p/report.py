"""The command line of p2p, its matrices of results, and the report: tables for people, and the JSON file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicomm.cli import arguments
from mpicomm.devices.base import Link
from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import format_cell

NBYTES_ON_GPUS, NBYTES_ON_HOST = 256 << 20, 16 << 20

Cell = float | int | bool | str | None
"""None if there is nothing to measure, or if the driver gives no value."""


@dataclass(frozen=True)
class Matrix:
    """One matrix. ``unit`` is "GB/s" or "us" for a measurement, and "" for an attribute."""

    title: str
    unit: str
    cells: list[list[Cell]]


def fill(title: str, unit: str, size: int, cell: Callable[[int, int], Cell]) -> Matrix:
    """Return the matrix of ``cell(source, target)``."""
    return Matrix(title, unit, [[cell(source, target) for target in range(size)] for source in range(size)])


def link_matrices(links: Sequence[Sequence[Link]]) -> list[Matrix]:
    """Return the matrices of links: the path, and CUDA's attributes if there are any."""
    fields = ("path", "access", "performance_rank", "native_atomics")
    titles = ("path to memory", "peer access", "performance rank (0 is the fastest)", "native atomics")
    matrices = [
        Matrix(title, "", [[getattr(link, name) for link in row] for row in links])
        for title, name in zip(titles, fields, strict=True)
    ]
    return [each for each in matrices if any(cell is not None for row in each.cells for cell in row)]


NOTES = (
    "Bandwidth counts each byte once; within one memory it is read and written there.",
    "Latency of copies: the mean time of many in a row. Of a store: half of the time in which a word goes to the",
    "target and back. Of a load: the mean time of many loads that wait for each other.",
    "-: there is nothing to measure, no peer access, or the two kernels did not run at the same time.",
)
_FILE_WIDTH = 1000  # wide enough to fold no cell, if no terminal sets the width


@dataclass
class Report:
    """The measurements so far. ``end`` is "GPU" or "rank". Only the process with ``shows`` prints."""

    end: str
    shows: bool = True
    matrices: list[Matrix] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._console = Console(
            file=sys.stdout, width=None if sys.stdout.isatty() else _FILE_WIDTH, markup=False, highlight=False
        )

    def say(self, *lines: str) -> None:
        """Print lines."""
        if self.shows:
            for line in lines:
                self._console.print(line, soft_wrap=True)

    def add(self, matrix: Matrix) -> None:
        """Keep a matrix, and print it at once, because the next one may take some time."""
        self.matrices.append(matrix)
        if self.shows:
            # This is not the title of `Table`, because `Table` folds its title to its width.
            self._console.print(f"{matrix.title} ({matrix.unit})" if matrix.unit else matrix.title)
            # An attribute says how a GPU accesses another one. A measurement says how fast data goes to the other one.
            table = Table(f"from {self.end} \\ to {self.end}" if matrix.unit else f"{self.end} \\ peer")
            for number in range(len(matrix.cells)):
                table.add_column(str(number), justify="right")
            for number, row in enumerate(matrix.cells):
                table.add_row(str(number), *map(format_cell, row))
            self._console.print(table)

    def record(self, wrong: int) -> dict[str, Any]:
        """Return the results for the JSON file."""
        return {"matrices": [asdict(matrix) for matrix in self.matrices], "wrong": wrong, "ok": wrong == 0}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(
        prog="python -m mpicomm.p2p",
        description="Measure bandwidth and latency between each two GPUs of this machine, by copy engines and by "
        "kernels, with peer access and through host memory, and check every byte. If mpirun starts several ranks, "
        "measure between each two ranks, on GPUs or on the host, through the memory that they open for each other.",
    )
    count = arguments.count_from
    result.add_argument(
        "-b", "--bytes", type=arguments.parse_size, metavar="SIZE", help="of a copy; default: 256M, 16M on the host"
    )
    result.add_argument("-n", "--iters", type=count(1), default=10, metavar="N", help="copies in a round; default: 10")
    result.add_argument("-r", "--rounds", type=count(1), default=5, metavar="N", help="median of N; default: 5")
    arguments.add_file_arguments(result)
    ranks = result.add_argument_group("between ranks")
    arguments.add_communicator_arguments(ranks)
    return result


def forbid_rank_arguments(options: argparse.Namespace) -> None:
    """Raise `InvalidUsageError` for options that mean nothing in one process."""
    for name in ("device", "handle"):
        if getattr(options, name) != "auto":
            raise InvalidUsageError(
                f"--{name} is for ranks: start them with mpirun -np N python -m mpicomm.p2p, or leave --{name} out"
            )
