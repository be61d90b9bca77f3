"""A matrix of results: a row for each source, a column for each target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Cell = float | int | bool | str | None
"""None if there is nothing to measure, or if the driver gives no value."""


@dataclass(frozen=True)
class Matrix:
    """One matrix. ``unit`` is "GB/s" or "us" for a measurement, and "" for an attribute."""

    title: str
    unit: str
    cells: list[list[Cell]]

    @property
    def measured(self) -> bool:
        """Whether it has a measurement."""
        return bool(self.unit) and any(cell is not None for row in self.cells for cell in row)

    @property
    def record(self) -> dict[str, Any]:
        """The matrix for the JSON file."""
        return {"title": self.title, "unit": self.unit, "cells": self.cells}


def fill(title: str, unit: str, size: int, cell: Callable[[int, int], Cell]) -> Matrix:
    """Return the matrix of ``cell(source, target)``."""
    return Matrix(title, unit, [[cell(source, target) for target in range(size)] for source in range(size)])
