"""Draw the pictures of the document for contributors: the rooms of the package, and the way of a call.

Run `python scripts/documents/architecture.py [FOLDER]`. The script writes rooms.svg and way_of_a_call.svg, without
FOLDER into mpicomm/docs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from shapes import GREY, INK, PANEL, PAPER, arrow, box, picture, text

FOLDER = Path(__file__).parents[2] / "mpicomm/docs"
BLUE, BLUE_INK, GREEN, YELLOW, YELLOW_INK = "#dbeafe", "#1d4ed8", "#15803d", "#fef3c7", "#b45309"
HEADS = [("grey", GREY), ("blue", BLUE_INK)]

BANDS: list[tuple[str, str, list[list[str]]]] = [
    (
        "Command lines",
        "programs that use the package",
        [["ring", "p2p", "tune"], ["__main__", "info", "doctor", "bench", "trace"], ["cli"]],
    ),
    ("Interface", "methods as in mpi4py, PyTorch", [["torch", "world"], ["experts"], ["api"]]),
    ("Calls", "read a call, choose its way", [["products"], ["dispatch", "messages", "windows", "observation"]]),
    (
        "Engines",
        "carry a collective out",
        [["domains"], ["collectives.gpu"], ["collectives.gpu.algorithms", "collectives.host"], ["collectives"]],
    ),
    (
        "One communicator",
        "its memory and its teardown",
        [["symmetric"], ["session"], ["sharing"]],
    ),
    ("The ranks", "agree, and compare clocks", [["recording"], ["cluster"]]),
    ("MPI's side", "buffers, types, requests", [["epilogues"], ["mpi"]]),
    ("Devices", "memory, streams, kernels", [["devices.cuda", "activity"], ["devices"], ["kernels"]]),
    (
        "Ground",
        "words, settings, waits",
        [["expressions", "log"], ["environment", "waiting"], ["errors", "sizes"]],
    ),
]
"""The bands of rooms from the top down: a title, what the rooms do, and rows of rooms that import only from below."""
USES_MPI = {
    "bench",
    "doctor",
    "p2p",
    "__main__",
    "cli",
    "torch",
    "world",
    "experts",
    "api",
    "observation",
    "messages",
    "dispatch",
}
USES_MPI |= {"domains", "collectives.gpu", "collectives.gpu.algorithms", "collectives.host", "collectives", "session"}
USES_MPI |= {"recording", "cluster", "mpi", "windows", "products"}
USES_CUDA = {"bench", "p2p", "collectives.gpu", "collectives.gpu.algorithms", "devices.cuda"}
WIDTH, LEFT, ROW, GAP = 900, 232, 28, 5


def rooms() -> str:
    """Return the picture of the rooms."""
    parts, y = list[str](), 16
    for title, purpose, rows in BANDS:
        height = len(rows) * (ROW + GAP) + GAP + 4
        parts += [
            box(10, y, WIDTH - 20, height, fill=PANEL, stroke="none"),
            text(24, y + height / 2 - 4, title, weight="bold", size=16, anchor="start"),
            text(24, y + height / 2 + 15, purpose, size=12, fill=GREY, anchor="start"),
        ]
        for number, row in enumerate(rows):
            parts += _row(row, y + GAP + 2 + number * (ROW + GAP))
        y += height + 8
    parts += [
        arrow(WIDTH - 32, 30, WIDTH - 32, y - 20, GREY, "grey", width=3),
        box(LEFT, y + 4, 22, 16, fill=BLUE),
        text(LEFT + 30, y + 17, "may import mpi4py", size=13, anchor="start"),
        _dot(LEFT + 211, y + 12),
        text(LEFT + 224, y + 17, "may import CuPy or cuda-bindings", size=13, anchor="start"),
        text(WIDTH - 24, y + 17, "arrow: imports", size=13, anchor="end"),
    ]
    return picture(WIDTH, y + 34, "The rooms of mpicomm", HEADS, parts)


def _row(names: Sequence[str], y: float) -> list[str]:
    """Return a row of boxes, each as wide as its name needs."""
    room = WIDTH - LEFT - 60 - GAP * (len(names) - 1)
    letters = sum(len(name) + 3 for name in names)
    parts, x = list[str](), float(LEFT)
    for name in names:
        width = room * (len(name) + 3) / letters
        parts.append(box(x, y, width, ROW, fill=BLUE if name in USES_MPI else PAPER))
        parts.append(text(x + width / 2, y + 19, name, size=14))
        if name in USES_CUDA:
            parts.append(_dot(x + width - 9, y + 9))
        x += width + GAP
    return parts


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="5" fill="{GREEN}"/>'


def _note(x: float, y: float, width: float, where: str, *lines: str, fill: str = PAPER, stroke: str = GREY) -> str:
    """Return a box with the name of a file and what happens there."""
    height = 30 + 18 * len(lines)
    parts = [box(x, y, width, height, fill=fill, stroke=stroke)]
    if where:
        parts.append(text(x + width / 2, y + 20, where, size=14, weight="bold"))
    parts += [text(x + width / 2, y + 39 + 18 * number, line, size=13) for number, line in enumerate(lines)]
    return "\n".join(parts)


def way_of_a_call() -> str:
    """Return the picture of the way from mpi4py's arguments to a launch."""
    column, step, first = 270, 285, 30
    middles = [first + column / 2 + number * step for number in range(3)]
    x1, x2, x3 = (middle - column / 2 for middle in middles)
    whole, centre = x3 + column - x1, middles[1]
    parts = [
        _note(x1, 16, whole, "comm.Allreduce(x, y)", "arguments as in mpi4py", fill=BLUE, stroke=BLUE_INK),
        arrow(middles[0], 64, middles[0], 88, GREY, "grey"),
        _note(x1, 90, 555, "api/methods.py", "asks host/selection.py: is it certainly MPI's?"),
        arrow(x1 + 555, 114, x3 + 28, 114, GREY, "grey"),
        _note(x3 + 30, 90, column - 30, "MPI", "small NumPy arrays", fill=YELLOW, stroke=YELLOW_INK),
        arrow(middles[0], 138, middles[0], 162, GREY, "grey"),
        _note(
            x1,
            164,
            whole,
            "dispatch/dispatcher.py",
            "asks gpu/plan_cache.py for the form of the call, then for the arrays",
        ),
    ]
    titles = ("First call of a form", "New call of a known form", "Known call")
    texts = ("no plan", "other addresses or lengths", "the same arrays again")
    for middle, title, words in zip(middles, titles, texts, strict=True):
        parts += [
            arrow(middle, 212, middle, 236, BLUE_INK, "blue"),
            text(middle, 256, title, size=16, weight="bold"),
            text(middle, 274, words, size=13, fill=GREY),
        ]
    ends = [
        (x1, 284, "dispatch/reader.py", ("reads and checks the arguments", "into a Call")),
        (x1, 372, "dispatch/dispatcher.py", ("chooses the way: MPI, mapped", "memory, pinned copies, or GPUs")),
        (
            x1,
            460,
            "decision.py, call_memory.py",
            (
                "serve the form; all ranks set up",
                "memory that is missing",
            ),
        ),
        (
            x1,
            548,
            "launcher of the algorithm",
            ("writes addresses, lengths and tag;", "the cache keeps a copy as a plan"),
        ),
        (x2, 284, "gpu/call_templates.py", ("reads bytes and addresses, and", "takes the launcher by length")),
        (
            x2,
            372,
            "launcher of the algorithm",
            ("writes addresses, lengths and tag", "into the argument of the kernel"),
        ),
        (x3, 284, "gpu/plan.py", ("has the steps; the second time", "they become a CUDA graph")),
    ]
    for x, y, where, lines in ends:
        parts.append(_note(x, y, column, where, *lines))
        last = y == max(other_y for other_x, other_y, *_ in ends if other_x == x)
        parts.append(arrow(x + column / 2, y + 66, x + column / 2, 656 if last else y + 86, GREY, "grey"))
    parts += [
        _note(
            x1,
            658,
            whole,
            "gpu/engine.py",
            "posts the call on the call log, lets the stream wait for the call before, and launches",
            fill=BLUE,
            stroke=BLUE_INK,
        ),
        arrow(centre, 706, centre, 730, GREY, "grey"),
        text(centre, 750, "The call returns. The kernels of the ranks meet on the GPUs, without the hosts.", fill=INK),
    ]
    return picture(WIDTH, 770, "The way of a call", HEADS, parts)


PICTURES = {"rooms.svg": rooms, "way_of_a_call.svg": way_of_a_call}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    folder = parser.parse_args().folder
    for name, draw in PICTURES.items():
        (folder / name).write_text(draw())


if __name__ == "__main__":
    main()
