"""Sizes, cells and columns of tables as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def nbytes_of(text: str) -> int:
    """Return the number of bytes of a text such as "8", "4K", "64M", "1G" or "2T"; raise ValueError for other text."""
    match = re.fullmatch(r"([0-9]+)([KMGT]?)", text.strip().upper())
    nbytes = int(match[1]) * _UNITS[match[2]] if match else 0
    if nbytes == 0:
        raise ValueError(f"{text!r} is no size: use bytes above 0, with K, M, G or T as in 64M")
    return nbytes


def format_size(nbytes: int) -> str:
    """Write a size with the largest unit that divides it; `nbytes_of` reads it back, except 0."""
    if nbytes == 0:
        return "0"
    unit = max((unit for unit in _UNITS if nbytes % _UNITS[unit] == 0), key=_UNITS.__getitem__)
    return f"{nbytes // _UNITS[unit]}{unit}"


def format_cell(value: object) -> str:
    """Return the text of a cell: "-" for None, floats with two digits."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Columns:
    """The columns of a table that is printed line by line: title, unit and width of each, as in nccl-tests."""

    columns: Sequence[tuple[str, str, int]]

    def head(self) -> list[str]:
        """Return the lines above the rows, which begin with "#": the titles, and the units if there are any."""
        titles, units, _ = zip(*self.columns, strict=True)
        rows = (titles, units) if any(units) else (titles,)
        return [f"#{self.line(row)[1:]}".rstrip() for row in rows]

    def line(self, cells: Iterable[object]) -> str:
        """Return a row: the cells at the right of their columns, and a space before each."""
        pairs = zip(cells, self.columns, strict=True)
        return "".join(f" {format_cell(cell):>{width - 1}}" for cell, (*_, width) in pairs)


def rich_table(
    title: str | None, columns: Iterable[str], rows: Iterable[Iterable[str]] = (), *, right: Collection[str] = ()
) -> Table:
    """Return a table of rich; the columns of these names are set to the ``right``."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def rich_console(file: IO[str], width: int = 1000) -> Console:
    """Return a console of rich that takes no text for markup. If ``file`` is no terminal, it has this width.

    The default is wide enough to fold no cell.
    """
    from rich.console import Console

    return Console(file=file, width=None if file.isatty() else width, markup=False, emoji=False, highlight=False)
