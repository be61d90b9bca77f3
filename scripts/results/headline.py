"""The headline table of the project's README.md."""

from __future__ import annotations

import math
import textwrap

from bench_tables import COLLECTIVES, OWN, PEERS, Bench, ranks
from cells import microseconds, nbytes, table

RANKS = (2, 4)
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
COMPARED = ("nccl", "nccl-symmetric", "torch")
NCCL = ("nccl", "nccl-symmetric")
PLACE = "out-of-place"


def headline(benches: list[Bench]) -> list[str]:
    """Return the lines: all-reduces with 2 and 4 ranks, then one geometric mean for each collective."""
    chosen = [_only(benches, "allreduce", "symmetric", count) for count in RANKS]
    head = ["all-reduce, us"]
    for count in RANKS:
        head += [f"{count} ranks: {OWN}", *(PEERS[peer] for peer in COMPARED)]
    rows = []
    for size in SIZES:
        cells = [nbytes(size)]
        for bench in chosen:
            outcomes = next(row for row in bench["results"] if row["nbytes"] == size)["places"][PLACE]
            cells += [f"**{microseconds(outcomes[OWN]['time_us'])}**"]
            cells += [microseconds(outcomes[peer]["time_us"]) for peer in COMPARED]
        rows.append(cells)
    where = ". ".join(f"{bench['date'][:10]}: {bench['hardware']}" for bench in chosen)
    peers = ", ".join(f"{PEERS[peer]} {chosen[0]['peers'][peer]}" for peer in COMPARED)
    return [
        "",
        *table(head, rows),
        "",
        *textwrap.wrap(
            f'All-reduce of float32 symmetric arrays, out of place, in CUDA graphs. {peers}. "NCCL symm." is NCCL with '
            f'symmetric windows, "torch" PyTorch\'s symmetric memory. {where}.',
            120,
        ),
        "",
        *textwrap.wrap(_means(benches), 120),
        "",
    ]


def _only(benches: list[Bench], collective: str, buffers: str, count: int) -> Bench:
    """Return the run of float32 in CUDA graphs; raises SystemExit where there is none, or more than one."""
    found = _runs(benches, collective, buffers, count)
    if len(found) != 1:
        raise SystemExit(f"{len(found)} runs of {collective} with {count} ranks and {buffers} arrays; need one")
    return found[0]


def _runs(benches: list[Bench], collective: str, buffers: str, count: int) -> list[Bench]:
    wanted = {"collective": collective, "buffers": buffers, "datatype": "float32", "eager": False, "beside": None}
    return [
        bench
        for bench in benches
        if ranks(bench) == count and all(bench["options"][name] == value for name, value in wanted.items())
    ]


def _means(benches: list[Bench]) -> str:
    """Say for each collective how the faster of NCCL's two ways compares, in one geometric mean over all sizes."""
    parts, sizes = [], set()
    for collective, title in COLLECTIVES.items():
        means = []
        for count in RANKS:
            runs = [run for run in _runs(benches, collective, "ordinary", count) if set(NCCL) <= set(run["peers"])]
            means += [f"{_mean(run):.2f}" for run in runs] or ["-"]
            sizes |= {row["nbytes"] for run in runs for row in run["results"]}
        if any(mean != "-" for mean in means):
            parts.append(f"{title.lower()} {' / '.join(means)}")
    return (
        f"Geometric means over {nbytes(min(sizes))} to {nbytes(max(sizes))} of ordinary arrays, the time of NCCL's "
        "faster way (with symmetric windows or without) divided by mpicomm's time, "
        f"{' / '.join(map(str, RANKS))} ranks: {', '.join(parts)}."
    )


def _mean(bench: Bench) -> float:
    logarithms = []
    for row in bench["results"]:
        outcomes = next(iter(row["places"].values()))
        best = min(outcomes[peer]["time_us"] for peer in NCCL)
        logarithms.append(math.log(best / outcomes[OWN]["time_us"]))
    return math.exp(sum(logarithms) / len(logarithms))
