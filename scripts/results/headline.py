"""The headline table of the project's README.md, and the figure above it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from bench_tables import COLLECTIVES, OWN, PEERS, Bench, ranks
from cells import microseconds, nbytes, table

RANKS = (2, 4)
SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 1 << 30)
FIGURE = 1 << 20
"""The bytes of the all-reduce in README's first figure."""
COMPARED = ("nccl", "nccl-symmetric", "torch")
NCCL = ("nccl", "nccl-symmetric")
PLACE = "out-of-place"
EAGER = "issue-2-h100.json"
"""The host's times in calls."""
STRIDED, STRIDED_ARRAY = "strided-*.json", "512 x 512 x 512 complex64"
"""Files of strided exchanges, the first of which the text takes, and the array."""


def headline(benches: list[Bench]) -> list[str]:
    """Return the lines: all-reduces with 2 and with 4 ranks, the fastest in bold, and what all collectives gain."""
    lines: list[str] = [""]
    where: dict[str, list[str]] = {}  # the numbers of GPUs of each machine
    for count in RANKS:
        bench = _only(benches, "allreduce", "symmetric", count)
        rows = []
        for size in SIZES:
            outcomes = next(row for row in bench["results"] if row["nbytes"] == size)["places"][PLACE]
            times = [outcomes[name]["time_us"] for name in (OWN, *COMPARED)]
            bold = [f"**{microseconds(time)}**" if time == min(times) else microseconds(time) for time in times]
            rows.append([nbytes(size), *bold])
        lines += table([f"{count} ranks, us", OWN, *(PEERS[peer] for peer in COMPARED)], rows)
        lines += [""]
        gpus, _, machine = bench["hardware"].partition(" x ")
        where.setdefault(f"{machine}; {bench['date'][:10]}; {_versions(bench)}", []).append(gpus)
    machines = " ".join(f"{' and '.join(gpus)} x {machine}." for machine, gpus in where.items())
    text = (
        "All-reduces of float32 in symmetric arrays, out of place, in CUDA graphs; NVLink SHARP was off for all. NCCL "
        f"symm. is NCCL with symmetric windows, torch is PyTorch's symmetric memory. {machines} "
        + _range_of_means(benches)
    )
    return [*lines, *textwrap.wrap(text, 120), "", *textwrap.wrap(f"{_eager()}{_strided()}", 120), ""]


def _eager() -> str:
    """Say what an all-reduce costs the host without a CUDA graph."""
    document = json.loads((Path(__file__).parent / EAGER).read_text())
    times = next(row[1:] for row in document["rows"] if row[0] == "`Allreduce`, CuPy arrays")
    known, known_nccl, new, new_nccl = map(microseconds, times)
    return (
        f"Without a graph the host's time counts, too: an Allreduce of 64 KiB in CuPy arrays takes it {known} us (NCCL "
        f"{known_nccl} us) if the same call was made before, and {new} us (NCCL {new_nccl} us) with a new size "
        f"({_gpus(document)}, {document['date'][:10]})."
    )


def _strided() -> str:
    """Say what an array takes to be split along another axis; nothing if no file has it."""
    for path in sorted(Path(__file__).parent.glob(STRIDED)):
        documents = json.loads(path.read_text())
        document = documents[0] if isinstance(documents, list) else documents
        row = next(
            dict(zip(document["columns"], each, strict=True))
            for each in document["rows"]
            if each[0].startswith(STRIDED_ARRAY)
        )
        time, flat, packing = (row[name] for name in ("plan 0 to 1, us", "Alltoall, us", "packing and Alltoall, us"))
        return (
            f" `redistribute` of {STRIDED_ARRAY} takes {time / flat:.2f} times an Alltoall of its bytes, packing "
            f"{packing / flat:.2f} times ({_gpus(document)}, {document['date'][:10]})."
        )
    return ""


def figure(benches: list[Bench]) -> list[str]:
    """Return the lines: one all-reduce between the most ranks, and the faster way of NCCL.

    The text of the headline table has the whole hardware and the date.
    """
    bench = _only(benches, "allreduce", "symmetric", RANKS[-1])
    outcomes = next(row for row in bench["results"] if row["nbytes"] == FIGURE)["places"][PLACE]
    own, nccl = outcomes[OWN]["time_us"], min(outcomes[name]["time_us"] for name in NCCL)
    text = (
        f"On {_gpus(bench)} an all-reduce of {nbytes(FIGURE)} (float32, symmetric arrays, a CUDA graph) takes "
        f"{microseconds(own)} us, and {microseconds(nccl)} us with NCCL {bench['peers']['nccl']}."
    )
    return ["", *textwrap.wrap(text, 120), ""]


def _versions(bench: Bench) -> str:
    return ", ".join(f"{PEERS[peer]} {bench['peers'][peer]}" for peer in ("nccl", "torch"))


def _gpus(bench: dict[str, Any]) -> str:
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
    plain = {"datatype": "float32", "eager": False, "vary": False, "wire_dtype": None}
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
