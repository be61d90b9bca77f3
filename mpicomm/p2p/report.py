"""The report of the command: tables for people, and the JSON file."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from mpicomm.p2p.matrix import Cell, Matrix

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
            self._console.print(table_of(matrix, self.end))

    def record(self, wrong: int) -> dict[str, Any]:
        """Return the results for the JSON file."""
        return {
            "matrices": [matrix.record for matrix in self.matrices],
            "wrong": wrong,
            "ok": wrong == 0,
        }


def table_of(matrix: Matrix, end: str) -> Table:
    """Return the table of a matrix, without its title."""
    # An attribute says how a GPU accesses another GPU. A measurement says how fast data goes from one to the other.
    corner = f"from {end} \\ to {end}" if matrix.unit else f"{end} \\ peer"
    table = Table()
    table.add_column(corner)
    for number in range(len(matrix.cells)):
        table.add_column(str(number), justify="right")
    for number, row in enumerate(matrix.cells):
        table.add_row(str(number), *map(format_cell, row))
    return table


def format_cell(value: Cell) -> str:
    """Return the text of a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
