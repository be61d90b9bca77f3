"""Tables and their cells in Markdown."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_NO_LETTERS = re.compile(r"geometric mean|\b([KMG]i)?B\b|\bto\b")  # words that numbers and sizes have beside them


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; columns of numbers and sizes are set to the right."""
    marks = []
    for column in range(len(head)):
        cells = [_NO_LETTERS.sub("", row[column]) for row in rows]
        marks.append("---" if any(re.search("[A-Za-z]", cell) for cell in cells) else "---:")
    return [_line(head), _line(marks), *(_line(row) for row in rows)]


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: Any) -> str:
    """Write a cell as the JSON file has it: nothing for null, and a list of two as a range."""
    if value is None:
        return ""
    if isinstance(value, list):
        return " to ".join(number(part) for part in value)
    return str(value)


def microseconds(value: float | None) -> str:
    """Write a time with three digits or so; a dash for None."""
    if value is None:
        return "-"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}"


def nbytes(value: int) -> str:
    """Write a size with the largest unit that divides it."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if value >= 1 << shift and value % (1 << shift) == 0:
            return f"{value >> shift} {unit}"
    return f"{value} B"
