"""A matrix of results: a row for each source, a column for each target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from mpicomm.devices.base import Link

Cell = float | int | bool | str | None
"""None if there is nothing to measure, or if the driver gives no value."""


@dataclass(frozen=True)
class Matrix:
    """One matrix. ``unit`` is "GB/s" or "us" for a measurement, and "" for an attribute."""

    title: str
    unit: str
    cells: list[list[Cell]]

    @property
    def record(self) -> dict[str, Any]:
        """The matrix for the JSON file."""
        return {"title": self.title, "unit": self.unit, "cells": self.cells}


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
