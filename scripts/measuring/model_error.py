"""How far the model of several nodes is from recorded runs: a table of `python scripts/measuring/predict.py`.

The runs are all-reduces between peer domains of one machine, by measure_internode.py. Two domains of one rank tell the
cost of the network, which is the engine here. Two domains of two ranks are predicted from that.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from result_file import Table

from mpicomm.bench.model.accuracy import Run, compare, error_of
from mpicomm.bench.model.group import DomainTimes, MeasuredTimes
from mpicomm.bench.model.network import Network
from mpicomm.bench.model.schedules import System, predict
from mpicomm.domains.schedules import PIECE_NBYTES
from mpicomm.sizes import nbytes_of

FOLDER = Path(__file__).resolve().parents[1] / "results"
ONE_RANK, TWO_RANKS = (FOLDER / f"internode-2x{ranks}-h100.json" for ranks in (1, 2))


def table() -> Table:
    """Return the table: a row for each engine and size."""
    engines = {row[1]: None for row in _rows(TWO_RANKS)}
    rows: list[list[Any]] = []
    said = []
    for engine in engines:
        network, group = network_of(engine), group_of(engine)
        runs = [Run(2, size, time_us) for size, time_us in times_of(TWO_RANKS, engine, "Allreduce")]
        compared = compare(runs, partial(_predicted_us, group, network))
        said.append(f"{engine} ({network.latency_us:.0f} us, {network.gb_s:.2g} GB/s): {error_of(compared)}")
        for size, each in zip(sizes_of(TWO_RANKS, engine), compared, strict=True):
            rows.append([engine, size, round(each.run.time_us), round(each.predicted_us), round(each.ratio, 2)])
    text = (
        "**Predicted, not measured**, beside the measured time, in us. The network is what the engine makes of one "
        f"machine: its latency and bandwidth are those of [two peer domains of one rank]({ONE_RANK.name}). "
        f"The domain is [measured]({TWO_RANKS.name}); a reduce-scatter and an all-gather are taken to last half "
        f"as long as its all-reduce. {'; '.join(said)}."
    )
    return Table(
        group="Predicted",
        title="Predicted: all-reduce of 2 x 2 ranks, against runs",
        hardware=json.loads(TWO_RANKS.read_text())["hardware"],
        columns=["engine", "size", "measured", "predicted", "predicted / measured"],
        rows=rows,
        text=text,
    )


def network_of(engine: str) -> Network:
    """Return the cost of the network that makes the model's times of two domains of one rank those of the runs.

    The smallest run is all latency. The largest run is pieces, and each piece takes the latency and its transfer.
    """
    points = times_of(ONE_RANK, engine, "Allreduce")
    (_, latency_us), (nbytes, time_us) = points[0], points[-1]
    return Network(nbytes / (time_us - nbytes / PIECE_NBYTES * latency_us) / 1e3, latency_us)


def group_of(engine: str) -> DomainTimes:
    """Return the domain of two ranks, as measured in the same run as ``engine``."""
    points = times_of(TWO_RANKS, engine, "one peer domain")
    half = MeasuredTimes([(nbytes, time_us / 2) for nbytes, time_us in points])
    return DomainTimes(2, {"allreduce": MeasuredTimes(points), "reduce_scatter": half, "allgather": half}, {})


def times_of(path: Path, engine: str, column: str) -> list[tuple[int, float]]:
    """Return the bytes and microseconds of a column."""
    index = json.loads(path.read_text())["columns"].index(column)
    return [(nbytes_of(row[0]), row[index]) for row in _rows(path) if row[1] == engine]


def sizes_of(path: Path, engine: str) -> list[str]:
    """Return the sizes that an engine was measured at, as text."""
    return [row[0] for row in _rows(path) if row[1] == engine]


def _rows(path: Path) -> list[list[Any]]:
    rows: list[list[Any]] = json.loads(path.read_text())["rows"]
    return rows


def _predicted_us(group: DomainTimes, network: Network, nodes: int, nbytes: int) -> float:
    return predict(System(group, nodes, network), "allreduce", nbytes).time_us
