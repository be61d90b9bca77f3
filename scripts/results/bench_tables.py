"""The sections of `python -m mpicomm.bench` results, and their overview."""

from __future__ import annotations

import re
from typing import Any

from cells import microseconds, nbytes, table

Bench = dict[str, Any]

OWN = "mpicomm"
UNQUANTIZED = "mpicomm-unquantized"
NOISE = 0.03
COLLECTIVES = {
    "allreduce": "All-reduce",
    "allgather": "All-gather",
    "allgatherv": "All-gather (v)",
    "reduce_scatter": "Reduce-scatter",
    "alltoall": "All-to-all",
    "alltoallv": "All-to-all (v)",
    "bcast": "Broadcast",
    "reduce": "Reduce",
    "gather": "Gather",
    "scatter": "Scatter",
    "barrier": "Barrier",
    "sendrecv": "Send and receive",
}
PEERS = {
    "nccl": "NCCL",
    "nccl-symmetric": "NCCL symm.",
    "torch": "torch",
    "nvshmem": "NVSHMEM",
    "mpi": "MPI",
    UNQUANTIZED: "not quantized",
}
PLACES = {"out-of-place": "", "in-place": "in place: "}
QUANTIZED = "The elements travel quantized. Bandwidths count the bytes of the elements."
UNEVEN = "The blocks are uneven: 1/4, 3/4, 5/4 and 7/4 of an even block with 4 ranks, 1/2 and 3/2 with 2 ranks."
REMARKS = {
    "allgatherv": UNEVEN,
    "alltoallv": UNEVEN,
    "sendrecv": "Every rank sends to the next rank at once. NCCL groups ncclSend and ncclRecv.",
}


def ranks(bench: Bench) -> int:
    """Return how many ranks ran."""
    found = re.search(r"-np (\d+)", bench["command"])
    if found is None:
        raise SystemExit(f"{bench['file']}: the command has no -np")
    return int(found[1])


def place(bench: Bench) -> tuple[Any, ...]:
    """Return the place of a section among all: float32 in CUDA graphs comes first, with symmetric arrays."""
    options = bench["options"]
    usual = (
        options["eager"],
        options.get("vary", False),
        options["datatype"] != "float32",
        options["datatype"],
        bool(options.get("wire_dtype")),
    )
    return (list(COLLECTIVES).index(bench["collective"]), ranks(bench), *usual, options["buffers"] != "symmetric")


def bench_title(bench: Bench) -> str:
    """Return the heading of a section."""
    options = bench["options"]
    parts = [COLLECTIVES[bench["collective"]], f"{ranks(bench)} ranks"]
    if bench["collective"] != "barrier":
        parts += [f"{options['buffers']} arrays", options["datatype"]]
    if options.get("wire_dtype"):
        parts.append(f"quantized as {options['wire_dtype']}")
    if options["eager"]:
        parts.append("call by call")
    if options.get("vary"):
        parts.append("each call of another size")
    return ", ".join(parts)


def versions_of(bench: Bench) -> dict[str, str]:
    """Return the versions of mpicomm, of its dependencies, and of its peers."""
    peers = {PEERS[name]: version for name, version in bench["peers"].items() if name != UNQUANTIZED}
    return {**bench["versions"], **peers}


def anchor(title: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def overview(benches: list[Bench]) -> list[str]:
    """Return a table of all geometric means, one run of the bench a line."""
    rows = []
    for bench in benches:
        sizes = [row["nbytes"] for row in bench["results"]]
        span = nbytes(sizes[0]) if len(sizes) == 1 else f"{nbytes(sizes[0])} to {nbytes(sizes[-1])}"
        means = bench["geometric_means"]
        cells = [" / ".join(f"{mean:.2f}" for mean in means.get(peer, {}).values()) for peer in _peers(benches)]
        title = bench_title(bench)
        rows.append([f"[{title}](#{anchor(title)})", span if sizes != [0] else "", *cells])
    return table(["", "sizes", *(PEERS[peer] for peer in _peers(benches))], rows)


def behind(benches: list[Bench]) -> list[str]:
    """Return a list of the sizes at which a peer is faster by more than noise. Each run of the bench has a line."""
    lines = []
    for bench in benches:
        sizes: dict[str, dict[int, None]] = {}
        for row in bench["results"]:
            for outcomes in row["places"].values():
                for peer in bench["peers"].keys() & outcomes.keys():
                    if _ratio(outcomes, peer) < 1 - NOISE:
                        sizes.setdefault(PEERS[peer], {})[row["nbytes"]] = None
        said = [f"{peer} at {', '.join(map(nbytes, found))}" for peer, found in sorted(sizes.items())]
        if said:
            title = bench_title(bench)
            lines.append(f"* [{title}](#{anchor(title)}): {'; '.join(said)}")
    return lines


def bench_section(bench: Bench, versions: dict[str, str]) -> list[str]:
    """Return the lines below the heading; only versions that are not in ``versions`` are named."""
    named = "".join(f"; {name} {text}" for name, text in versions_of(bench).items() if name not in versions)
    lines = [
        f"{bench['hardware']}. {bench['date'][:10]}; {_how(bench)}{named}. [{bench['file']}]({bench['file']})",
        "",
        f"`{bench['command']}`",
        "",
    ]
    if bench["collective"] in REMARKS:
        lines += [REMARKS[bench["collective"]], ""]
    if bench["options"].get("wire_dtype"):
        lines += [QUANTIZED, ""]
    notes = [line for note in bench.get("notes", []) for line in (note, "")]
    return [*lines, *_times(bench), "", *_footer(bench), *notes]


def _peers(benches: list[Bench]) -> list[str]:
    return [peer for peer in PEERS if any(peer in bench["peers"] for bench in benches)]


def _how(bench: Bench) -> str:
    options = bench["options"]
    if options["eager"] or options.get("vary") or not options["cudagraph"]:
        return f"{options['iters']} calls one after the other"
    return f"{options['cudagraph']} launches of a CUDA graph of {options['iters']} calls"


def _times(bench: Bench) -> list[str]:
    """Return the table: a line for each size, and the geometric means."""
    peers = _peers([bench])
    places = list(bench["results"][0]["places"])
    sized = bench["results"][-1]["nbytes"] > 0
    issue = any(mine["issue_us"] is not None for mine in bench["results"][0]["places"][places[0]].values())
    head, means = ["size"], ["geometric mean"]
    for place in places:
        head.append(PLACES[place] + OWN)
        head += ["issue"] * issue + ["GB/s"] * sized
        means += [""] * (1 + issue + sized)
        for peer in peers:
            head += [PEERS[peer]] + ["issue"] * issue
            mean = bench["geometric_means"].get(peer, {}).get(place)
            means += [f"({mean:.2f})" if mean else ""] + [""] * issue
    rows = [[nbytes(row["nbytes"]), *_cells(row, places, peers, issue, sized)] for row in bench["results"]]
    if not sized:
        return table(head[1:], [row[1:] for row in rows])
    return table(head, rows if len(rows) == 1 else [*rows, means])


def _cells(row: dict[str, Any], places: list[str], peers: list[str], issue: bool, sized: bool) -> list[str]:
    cells = []
    for place in places:
        outcomes = row["places"][place]
        mine = outcomes[OWN]
        cells.append(_time(mine))
        cells += [microseconds(mine["issue_us"])] * issue + [f"{mine['busbw_gb_s']:.1f}"] * sized
        for peer in peers:
            other = outcomes.get(peer)
            if other is None:
                cells += ["-"] * (1 + issue)
                continue
            ratio = _ratio(outcomes, peer)
            text = f"{_time(other)} ({ratio:.2f})"
            cells.append(f"**{text}**" if ratio < 1 - NOISE else text)
            cells += [microseconds(other["issue_us"])] * issue
    return cells


def _ratio(outcomes: dict[str, Any], peer: str) -> float:
    ratio: float = outcomes[peer]["time_us"] / outcomes[OWN]["time_us"]
    return ratio


def _time(outcome: dict[str, Any]) -> str:
    return microseconds(outcome["time_us"]) + ("\\*" if outcome["eager"] else "")


def _footer(bench: Bench) -> list[str]:
    """Return the lines below a table: missing peers, stars, and wrong elements."""
    said = [f"{PEERS.get(name, name)} is missing: {reason}." for name, reason in bench["missing"].items()]
    for row in bench["results"]:
        for place, reasons in row["missing"].items():
            said += [f"{nbytes(row['nbytes'])} {place}, {PEERS[name]}: {why}." for name, why in reasons.items()]
        for place, outcomes in row["places"].items():
            for name, outcome in outcomes.items():
                if outcome["eager"]:
                    said.append(f"\\* {PEERS.get(name, name)} is timed call by call: {outcome['eager']}.")
                if outcome["wrong"]:
                    where = f"{nbytes(row['nbytes'])} {place}"
                    said.append(f"{PEERS.get(name, name)} has {outcome['wrong']} wrong elements at {where}.")
    return [line for each in dict.fromkeys(said) for line in (each, "")]
