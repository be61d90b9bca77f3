"""The headline table of the project's README.md, and the figure above it."""

from __future__ import annotations

import re
import textwrap
from statistics import geometric_mean

from bench_tables import COLLECTIVES, OWN, PEERS, Bench, ranks
from cells import microseconds, nbytes, table

RANKS = (2, 4)
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 30)
FIGURE = 1 << 20
"""The bytes of the all-reduce in README's first figure."""
COMPARED = ("nccl", "nccl-symmetric", "torch")
NCCL = ("nccl", "nccl-symmetric")
PLACE = "out-of-place"


def headline(benches: list[Bench]) -> list[str]:
    """Return the lines: all-reduces with 2 and 4 ranks, the fastest in bold, and what all collectives gain."""
    chosen = [_only(benches, "allreduce", "symmetric", count) for count in RANKS]
    head = ["all-reduce, us"]
    for count in RANKS:
        head += [f"{count} ranks: {OWN}", *(PEERS[peer] for peer in COMPARED)]
    rows = []
    for size in SIZES:
        cells = [nbytes(size)]
        for bench in chosen:
            outcomes = next(row for row in bench["results"] if row["nbytes"] == size)["places"][PLACE]
            times = [outcomes[name]["time_us"] for name in (OWN, *COMPARED)]
            cells += [f"**{microseconds(time)}**" if time == min(times) else microseconds(time) for time in times]
        rows.append(cells)
    where = " ".join(f"{bench['date'][:10]}: {bench['hardware']}; {_versions(bench)}." for bench in chosen)
    text = (
        "float32 symmetric arrays, out of place, in CUDA graphs. NCCL symm. is NCCL with symmetric "
        f"windows, torch is PyTorch's symmetric memory. {where} {_range_of_means(benches)}"
    )
    return ["", *table(head, rows), "", *textwrap.wrap(text, 120), ""]


def figure(benches: list[Bench]) -> list[str]:
    """Return the lines: one all-reduce between the most ranks, and the faster way of NCCL.

    The text of the headline table has the whole hardware.
    """
    bench = _only(benches, "allreduce", "symmetric", RANKS[-1])
    outcomes = next(row for row in bench["results"] if row["nbytes"] == FIGURE)["places"][PLACE]
    own, nccl = outcomes[OWN]["time_us"], min(outcomes[name]["time_us"] for name in NCCL)
    text = (
        f"On {_gpus(bench)} an all-reduce of {nbytes(FIGURE)} takes {microseconds(own)} us, and {microseconds(nccl)} "
        f"us with NCCL {bench['peers']['nccl']} ({bench['date'][:10]})."
    )
    return ["", *textwrap.wrap(text, 120), ""]


def _versions(bench: Bench) -> str:
    return ", ".join(f"{PEERS[peer]} {bench['peers'][peer]}" for peer in COMPARED)


def _gpus(bench: Bench) -> str:
    """Return the GPUs in a few words: "4 H200s"."""
    found = re.match(r"(\d+) x NVIDIA (\w+)", bench["hardware"])
    if found is None:
        raise SystemExit(f"{bench['file']}: the hardware does not begin with the GPUs")
    return f"{found[1]} {found[2]}s"


def _only(benches: list[Bench], collective: str, buffers: str, count: int) -> Bench:
    """Return the run of float32 in CUDA graphs; raises SystemExit where there is none, or more than one."""
    found = _runs(benches, collective, buffers, count)
    if len(found) != 1:
        raise SystemExit(f"{len(found)} runs of {collective} with {count} ranks and {buffers} arrays; need one")
    return found[0]


def _runs(benches: list[Bench], collective: str, buffers: str, count: int) -> list[Bench]:
    plain = {"datatype": "float32", "eager": False, "vary": False, "beside": None, "wire_dtype": None}
    wanted = {"collective": collective, "buffers": buffers, **plain}
    return [
        bench
        for bench in benches
        if ranks(bench) == count and all(bench["options"].get(name, value) == value for name, value in wanted.items())
    ]


def _range_of_means(benches: list[Bench]) -> str:
    """Say how the faster of NCCL's two ways compares in the worst and in the best of all collectives."""
    means, sizes = [], set()
    for collective in COLLECTIVES:
        for count in RANKS:
            for run in _runs(benches, collective, "ordinary", count):
                if set(NCCL) <= set(run["peers"]):
                    means.append(_mean(run))
                    sizes |= {row["nbytes"] for row in run["results"]}
    return (
        f"With ordinary arrays NCCL takes {min(means):.2f} to {max(means):.2f} times as long, by collective. These are "
        f"geometric means of {nbytes(min(sizes))} to {nbytes(max(sizes))}, with the faster of NCCL's two ways."
    )


def _mean(bench: Bench) -> float:
    ratios = []
    for row in bench["results"]:
        outcomes = next(iter(row["places"].values()))
        best = min(outcomes[peer]["time_us"] for peer in NCCL)
        ratios.append(best / outcomes[OWN]["time_us"])
    return geometric_mean(ratios)
