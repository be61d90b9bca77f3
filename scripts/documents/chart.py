"""Draw the times of all-reduces that scripts/results has, for README.md, or the times of strided exchanges.

Run `python scripts/documents/chart.py [FILE] [--strided RESULT]`. Without FILE the script writes
mpicomm/docs/allreduce.svg. RESULT is a file of scripts/measuring/measure_strided.py.
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
BARS = {"plan 0 to 1, us": "#1d4ed8", "Alltoallw 0 to 1, us": "#60a5fa", "packing and Alltoall, us": "#b91c1c"}
"""Columns of strided exchanges, and their colours."""
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


def strided_chart(result: Path) -> str:
    """Return bars of the times of strided exchanges, as shares of an Alltoall of as many bytes."""
    documents = json.loads(result.read_text())
    table = documents[0] if isinstance(documents, list) else documents
    flat, *columns = (table["columns"].index(name) for name in ("Alltoall, us", *BARS))
    rows = [(row[0], [row[column] / row[flat] for column in columns]) for row in table["rows"] if row[flat]]
    left, width, step = 210, 560, 56
    longest = max(1, *(share for _, shares in rows for share in shares))
    height = TOP + step * len(rows) + 50
    parts = [text(WIDTH / 2, 28, table["title"], weight="bold")]
    for number, (name, shares) in enumerate(rows):
        top = TOP + step * number
        parts.append(text(left - 10, top + 26, name, size=13, anchor="end"))
        for place, (share, colour) in enumerate(zip(shares, BARS.values(), strict=True)):
            end = left + width * share / longest
            parts.append(box(left, top + 16 * place, end - left, 13, fill=colour, stroke="none"))
            parts.append(text(end + 6, top + 16 * place + 11, f"{share:.2f}", size=12, anchor="start"))
    one = left + width / longest
    parts += [_rule(one, TOP - 6, one, height - 44), text(one, height - 28, "Alltoall of as many bytes", size=13)]
    for place, (name, colour) in enumerate(BARS.items()):
        parts.append(box(20 + 200 * place, height - 18, 14, 8, fill=colour, stroke="none"))
        parts.append(text(40 + 200 * place, height - 10, name.removesuffix(", us"), size=13, anchor="start"))
    return picture(WIDTH, height, "Times of strided exchanges", [], parts)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PICTURE)
    parser.add_argument("--strided", type=Path, metavar="RESULT", help="draw this file's strided exchanges")
    options = parser.parse_args()
    options.file.write_text(chart() if options.strided is None else strided_chart(options.strided))


if __name__ == "__main__":
    main()
