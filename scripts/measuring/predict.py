"""Predict collectives over many nodes from recorded results of one: `python scripts/measuring/predict.py`.

It replaces predicted-8-h200.json in scripts/results, and by model_error.py predicted-against-runs-h100.json. Run
`python scripts/results/tables.py` after it. A test compares the files with the text that this script would write.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import model_error
from result_file import Table, add_tables

from mpicomm.bench.model.group import DomainTimes, read_group
from mpicomm.bench.model.nccl import ring_us, tree_us
from mpicomm.bench.model.network import Network
from mpicomm.bench.model.schedules import PACKING, System, predict

FOLDER = Path(__file__).resolve().parents[1] / "results"
NAME, AGAINST_RUNS = "predicted-8-h200.json", "predicted-against-runs-h100.json"
SOURCES = [FOLDER / f"{name}-8-h200.json" for name in ("allreduce", "allgather", "alltoall", "bcast")]
NETWORK = Network(gb_s=50, latency_us=5)
NODES = [2**power for power in range(1, 11)]
SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "64 MiB": 64 << 20, "1 GiB": 1 << 30}
TITLES = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "bcast": "broadcast",
    "alltoall": "all-to-all",
}
FIRST = "allreduce"
AS_FIRST = "**Predicted, not measured**, like the all-reduce above."
PREDICTORS = {
    "mpicomm": lambda *call: predict(*call).time_us,
    "NCCL ring": ring_us,
    "NCCL tree": tree_us,
}


def tables() -> list[Table]:
    """Return a table of predictions for each collective."""
    group = read_group(SOURCES)
    sources = ", ".join(f"[{path.name}]({path.name})" for path in SOURCES)
    text = (  # above the first table
        f"**Predicted, not measured.** Times are us by the model of `python -m mpicomm.bench --model`, from {sources}. "
        f"Assumed, not measured: each GPU has a network card of {NETWORK.gb_s:g} GB/s in each direction (400 Gb/s "
        f"InfiniBand NDR), a message takes {NETWORK.latency_us:g} us, and messages do not meet in switches. "
        f"{'; '.join(group.lines()[1:])}. To pack the blocks of several peer domains takes {PACKING.latency_us:g} us "
        f"and the time of the bytes at {PACKING.gb_s:g} GB/s. What the model leaves out, and the formulae, are in the "
        "docstrings of mpicomm/bench/model."
    )
    machine = json.loads(SOURCES[0].read_text())["hardware"]
    return [
        Table(
            group="Predicted",
            title=f"Predicted: {title}, nodes of {group.ranks} GPUs",
            hardware=f"No machine; one node is as measured on {machine}",
            columns=["nodes", *(f"{size}: {way}" for size in SIZES for way in _ways(group, collective))],
            rows=[_row(group, collective, nodes) for nodes in NODES],
            text=text if collective == FIRST else AS_FIRST,
        )
        for collective, title in TITLES.items()
    ]


def _row(group: DomainTimes, collective: str, nodes: int) -> list[Any]:
    system = System(group, nodes, NETWORK)
    ways = _ways(group, collective)
    return [nodes, *(_rounded(PREDICTORS[way](system, collective, size)) for size in SIZES.values() for way in ways)]


def _ways(group: DomainTimes, collective: str) -> list[str]:
    """Return the predictors that have a time for a collective."""
    system = System(group, NODES[0], NETWORK)
    return [way for way, predictor in PREDICTORS.items() if predictor(system, collective, 1 << 20) is not None]


def _rounded(time_us: float | None) -> float | None:
    """Return three digits or so of a time."""
    if time_us is None:
        return None
    return round(time_us) if time_us >= 100 else round(time_us, 1 if time_us >= 10 else 2)


def main() -> None:
    """Write the files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, found in ((NAME, tables()), (AGAINST_RUNS, [model_error.table()])):
        path = FOLDER / name
        path.unlink(missing_ok=True)
        add_tables(path, found)


if __name__ == "__main__":
    main()
