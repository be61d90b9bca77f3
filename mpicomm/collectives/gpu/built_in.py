"""The built-in table of algorithms, measured on H200s, and the same table scaled to other links."""

from __future__ import annotations

from dataclasses import replace

from mpicomm.collectives.gpu.tuning import KIB, MIB, Row, Tuning, kind_of

_LINK_GB_S = 478.0
"""The speed of an H200's links each way: 18 NVLinks of 26.6 GB/s."""


def _row(operation: str, size: int, *changes: tuple[int, str], registered: bool = False, coded: bool = False) -> Row:
    return Row(kind_of(operation, registered=registered, coded=coded), size, ((0, "one_shot"), *changes))


def _allreduce(copies_from: dict[int, int], *, registered: bool = False) -> list[Row]:
    # Rows for two ranks have no "two_shot", because one hop between two ranks moves no more bytes than two hops.
    two_hops = {3: 384, 4: 256, 6: 152, 8: 176}
    return [
        _row(
            "Allreduce",
            size,
            *([(two_hops[size] * KIB + 1, "two_shot")] if size > 2 else []),
            (begin * MIB, "copy_engine"),
            registered=registered,
        )
        for size, begin in copies_from.items()
    ]


_ROWS = (
    *_allreduce({2: 240, 3: 192, 4: 176, 6: 160, 8: 192}),
    *_allreduce({2: 112, 3: 112, 4: 112, 6: 96, 8: 120}, registered=True),
    # Calls with codes, measured on H100s. Two hops between two ranks move as many bytes as one hop, but each rank codes
    # and reduces only half of the results. Up to 2944 KiB of codes two hops take one step.
    _row("Allreduce", 2, (MIB + 1, "two_shot"), (2944 * KIB + 1, "one_shot"), (3584 * KIB, "two_shot"), coded=True),
    _row("Allreduce", 3, (384 * KIB + 1, "two_shot"), coded=True),
    _row("Allreduce", 4, (256 * KIB + 1, "two_shot"), coded=True),
    # Between 4 ranks a chain wins from 384 KiB on if call follows call. A chain adds 2 us for each rank on its way. So
    # a single call by a chain is as fast as two hops only from 2 MiB on. The bound lies in between, where one use loses
    # as much as the other gains. For 6 and 8 ranks the bound of the chain is computed from these times.
    _row("Bcast", 3, (896 * KIB, "chain")),
    _row("Bcast", 4, (576 * KIB, "chain")),
    _row("Bcast", 6, (448 * KIB, "two_shot"), (1280 * KIB, "chain")),
    _row("Bcast", 8, (384 * KIB, "two_shot"), (2048 * KIB, "chain")),
    _row("Bcast", 2, (144 * MIB, "copy_engine")),
    _row("Bcast", 2, (80 * MIB, "copy_engine"), registered=True),
    *(
        _row("Reduce", size, (begin * KIB, "two_shot"), (chain * KIB, "chain"))
        for size, begin, chain in ((3, 1024, 2560), (4, 1024, 3072), (6, 576, 3584), (8, 448, 4608))
    ),
    _row("Reduce", 2, (160 * MIB, "copy_engine")),
    *(
        _row(name, size, (begin * MIB, "copy_engine"), registered=True)
        for name in ("Allgather", "Alltoall")
        for size, begin in ((2, 152), (3, 120), (4, 160), (6, 144), (8, 176))
    ),
    *(
        _row(name, size, (begin * MIB, "copy_engine"))
        for name in ("Allgather", "Alltoall")
        for size, begin in ((2, 416), (3, 224), (4, 320))
    ),
    *(
        _row(name, size, (begin * MIB, "copy_engine"))
        for name in ("Gather", "Scatter")
        for size, begin in ((2, 224), (3, 224), (4, 320))
    ),
    *(
        _row("Reduce_scatter_block", size, (begin * MIB, "copy_engine"))
        for size, begin in ((2, 512), (3, 240), (4, 240), (6, 176), (8, 176))
    ),
)

BUILT_IN = Tuning("built in, measured on H200s", _ROWS, "NVIDIA H200")


def scaled(link_gb_s: float) -> Tuning:
    """Return the table for links that carry ``link_gb_s`` each way.

    The model: an algorithm for large messages has more launches and barriers, which take the same time on any GPU, and
    saves time on the links. So bounds grow with the speed of the links.
    """
    speed = link_gb_s / _LINK_GB_S
    rows = tuple(
        replace(row, choices=tuple((round(begin * speed), name) for begin, name in row.choices))
        for row in BUILT_IN.rows
    )
    source = f"{BUILT_IN.source}, scaled to links of {link_gb_s:.3g} GB/s"
    return replace(BUILT_IN, source=source, rows=rows, link_speed=speed)
