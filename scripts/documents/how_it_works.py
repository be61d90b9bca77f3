"""Draw how mpicomm works.

Run `python scripts/documents/how_it_works.py [FILE]`. Without FILE the script writes mpicomm/docs/how_it_works.svg.

The upper half shows set-up: ranks swap handles of their memory, and open memory of each other. The lower half shows a
collective: kernels store straight into the memory of their peers.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from shapes import GREY, PANEL, PAPER, arrow, box, picture, text

PICTURE = Path(__file__).parents[2] / "mpicomm/docs/how_it_works.svg"
WIDTH, HEIGHT = 840, 830
RANKS = (0, 1, 2)
COLUMN_WIDTH, FIRST_COLUMN, COLUMN_STEP = 230, 35, 270
FILLS = ("#bfdbfe", "#fde68a", "#bbf7d0")  # a colour for each rank
STROKES = ("#1d4ed8", "#b45309", "#15803d")


def left_of(rank: int) -> int:
    """Return the left edge of a rank's column."""
    return FIRST_COLUMN + rank * COLUMN_STEP


def middle_of(rank: int) -> int:
    """Return the middle of a rank's column."""
    return left_of(rank) + COLUMN_WIDTH // 2


def set_up() -> list[str]:
    """Return the upper half."""
    parts = [
        box(10, 10, WIDTH - 20, 380, fill=PANEL, stroke="none"),
        text(WIDTH / 2, 40, "Set-up: the ranks open each other's memory", size=19, weight="bold"),
        box(left_of(0), 58, left_of(2) + COLUMN_WIDTH - left_of(0), 52, fill=PAPER),
        text(WIDTH / 2, 80, "MPI swaps the handles", weight="bold"),
        text(WIDTH / 2, 100, "cudaIpcMemHandle_t; file descriptors go over unix sockets", size=14, fill=GREY),
    ]
    for rank in RANKS:
        left, middle = left_of(rank), middle_of(rank)
        parts += [
            arrow(middle - 70, 192, middle - 70, 113, STROKES[rank], f"rank{rank}"),
            text(middle - 36, 144, "own", size=14, fill=GREY),
            text(middle - 36, 162, "handle", size=14, fill=GREY),
            arrow(middle + 70, 110, middle + 70, 189, GREY, "grey"),
            text(middle + 32, 144, "others'", size=14, fill=GREY),
            text(middle + 32, 162, "handles", size=14, fill=GREY),
            box(left, 192, COLUMN_WIDTH, 92, fill=PAPER),
            text(middle, 214, f"rank {rank} maps memory of", weight="bold"),
            box(left, 310, COLUMN_WIDTH, 66, fill=FILLS[rank], stroke=STROKES[rank]),
            text(middle, 338, f"GPU {rank}", weight="bold"),
            text(middle, 361, f"memory of rank {rank}"),
            arrow(middle, 310, middle, 287, STROKES[rank], f"rank{rank}"),
        ]
        for owner in RANKS:
            x = left + 14 + 70 * owner
            parts += [
                box(x, 228, 62, 42, fill=FILLS[owner], stroke=STROKES[owner]),
                text(x + 31, 254, f"GPU {owner}", size=14),
            ]
    return parts


def collective() -> list[str]:
    """Return the lower half."""
    parts = [
        box(10, 402, WIDTH - 20, 418, fill=PANEL, stroke="none"),
        text(WIDTH / 2, 432, "Collective: kernels store into the memory of their peers", size=19, weight="bold"),
        text(WIDTH / 2, 456, "MPI takes no part", fill=GREY),
        box(left_of(0), 582, left_of(2) + COLUMN_WIDTH - left_of(0), 34, fill="#e5e7eb", stroke="none"),
        text(left_of(0) + 75, 605, "NVLink or PCIe", weight="bold"),
    ]
    for rank in RANKS:
        left, middle = left_of(rank), middle_of(rank)
        parts += [
            box(left, 472, COLUMN_WIDTH, 52, fill=FILLS[rank], stroke=STROKES[rank]),
            text(middle, 494, f"kernel on GPU {rank}", weight="bold"),
            text(middle, 514, "stores packets", size=14),
            box(left, 668, COLUMN_WIDTH, 100, fill=PAPER, stroke=STROKES[rank]),
            text(middle, 760, f"memory of GPU {rank}", weight="bold"),
        ]
    for receiver in RANKS:
        senders = [rank for rank in RANKS if rank != receiver]
        for number, sender in enumerate(senders):
            x = left_of(receiver) + 12 + 106 * number
            parts += [
                box(x, 678, 100, 58, fill=FILLS[sender], stroke=STROKES[sender]),
                text(x + 50, 702, "inbox", size=14),
                text(x + 50, 722, f"from rank {sender}", size=14),
            ]
            start = middle_of(sender) + (40 if receiver > sender else -40) * (1 if abs(receiver - sender) == 1 else 2)
            parts.append(arrow(start, 524, x + 50, 675, STROKES[sender], f"rank{sender}", width=2.5))
    parts.append(text(WIDTH / 2, 798, "Each kernel reads its inboxes; a packet itself shows whether it has arrived."))
    return parts


def drawing() -> str:
    """Return the whole SVG."""
    heads = [*((f"rank{rank}", STROKES[rank]) for rank in RANKS), ("grey", GREY)]
    return picture(WIDTH, HEIGHT, "How mpicomm works", heads, [*set_up(), *collective()])


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=PICTURE)
    parser.parse_args().file.write_text(drawing())


if __name__ == "__main__":
    main()
