"""The plot: a heat map for each matrix with measurements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from mpicomm.p2p.matrix import Matrix
from mpicomm.p2p.report import format_cell

_COLUMNS = 3
_MOST_TEXTS = 8  # more numbers in a row would overlap


def draw(matrices: Sequence[Matrix], end: str, path: Path, title: str) -> None:
    """Draw into a file. Its suffix names the format."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot

    measured = [matrix for matrix in matrices if matrix.measured]
    rows = math.ceil(len(measured) / _COLUMNS)
    figure, grid = pyplot.subplots(rows, _COLUMNS, figsize=(5.5 * _COLUMNS, 4.5 * rows), squeeze=False)
    for axes, matrix in zip(grid.flat, measured, strict=False):
        size = len(matrix.cells)
        values = [[math.nan if cell is None else float(cell) for cell in row] for row in matrix.cells]
        # Yellow is good: much bandwidth, little latency.
        image = axes.imshow(values, cmap="viridis" if matrix.unit == "GB/s" else "viridis_r")
        figure.colorbar(image, ax=axes, label=matrix.unit, shrink=0.8)
        for source, row in enumerate(matrix.cells if size <= _MOST_TEXTS else []):
            for target, cell in enumerate(row):
                box = {"facecolor": "white", "alpha": 0.7, "edgecolor": "none", "pad": 1.5}
                axes.text(target, source, format_cell(cell), ha="center", va="center", fontsize=8, bbox=box)
        axes.set_title(matrix.title.replace(", ", ",\n", 1), fontsize=10)
        axes.set_xticks(range(size))
        axes.set_yticks(range(size))
        axes.set_xlabel(f"to {end}")
        axes.set_ylabel(f"from {end}")
    for axes in grid.flat[len(measured) :]:
        axes.set_axis_off()
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
