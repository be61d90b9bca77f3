"""Draw the times of all-reduces that scripts/results has, for README.md.

Run `python scripts/documents/chart.py [FILE]`. Without FILE the script writes mpicomm/docs/allreduce.svg.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

from shapes import GREY, INK, PANEL, box, picture, text

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "mpicomm/docs/allreduce.svg"
RESULTS = {2: "allreduce-2-h100.json", 4: "allreduce-4-h100.json"}
LINES = {"mpicomm": "#1d4ed8", "nccl": "#b91c1c", "nccl-symmetric": "#b45309", "torch": "#15803d"}
NAMES = {"nccl": "NCCL", "nccl-symmetric": "NCCL, symmetric windows", "torch": "PyTorch's symmetric memory"}
WIDTH, HEIGHT, PANEL_WIDTH, PANEL_HEIGHT, TOP = 915, 400, 375, 280, 50
SMALLEST, LARGEST = 10, 30
"""Sizes, as powers of two of bytes."""
SHORTEST, LONGEST = 0, 4
"""Times, as powers of ten of microseconds."""


def panel(left: float, ranks: int) -> list[str]:
    """Return the lines of one number of ranks; both axes are logarithmic."""
    result: dict[str, Any] = json.loads((ROOT / "scripts/results" / RESULTS[ranks]).read_text())
    bottom = TOP + PANEL_HEIGHT

    def x(nbytes: float) -> float:
        return left + PANEL_WIDTH * (math.log2(nbytes) - SMALLEST) / (LARGEST - SMALLEST)

    def y(time_us: float) -> float:
        return bottom - PANEL_HEIGHT * (math.log10(time_us) - SHORTEST) / (LONGEST - SHORTEST)

    parts = [
        box(left, TOP, PANEL_WIDTH, PANEL_HEIGHT, fill=PANEL, stroke="none"),
        text(left + PANEL_WIDTH / 2, TOP - 14, f"{ranks} H100s", weight="bold"),
    ]
    for power in range(SHORTEST, LONGEST + 1):
        label = f"{10**power} us" if power < 3 else f"{10 ** (power - 3)} ms"
        parts.append(_rule(left, y(10**power), left + PANEL_WIDTH, y(10**power)))
        parts.append(text(left - 8, y(10**power) + 5, label, size=13, fill=GREY, anchor="end"))
    for power, label in ((10, "1 KiB"), (15, "32 KiB"), (20, "1 MiB"), (25, "32 MiB"), (30, "1 GiB")):
        parts.append(_rule(x(2**power), TOP, x(2**power), bottom))
        parts.append(text(x(2**power), bottom + 20, label, size=13, fill=GREY))
    for name, colour in LINES.items():
        times = [
            (row["nbytes"], row["places"]["out-of-place"][name]["time_us"])
            for row in result["results"]
            if row["nbytes"] >= 2**SMALLEST
        ]
        points = " ".join(f"{x(nbytes):.1f},{y(time_us):.1f}" for nbytes, time_us in times)
        width = 3 if name == "mpicomm" else 1.8
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:g}" y1="{y1:.1f}" x2="{x2:g}" y2="{y2:.1f}" stroke="#d1d5db"/>'


def chart() -> str:
    """Return the picture: a panel for each number of ranks, and the names of the lines below."""
    parts = [*panel(65, 2), *panel(510, 4)]
    left = 65.0
    for name, colour in LINES.items():
        words = NAMES.get(name, name)
        parts.append(box(left, HEIGHT - 29, 22, 4, fill=colour, stroke="none"))
        parts.append(text(left + 30, HEIGHT - 20, words, size=14, fill=INK, anchor="start"))
        left += 60 + 8.2 * len(words)
    return picture(WIDTH, HEIGHT, "Times of an all-reduce of float32 in symmetric arrays", [], parts)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PICTURE)
    parser.parse_args().file.write_text(chart())


if __name__ == "__main__":
    main()
