"""``python -m mpicomm.bench COLLECTIVE --model NODES --network GBPS,US --from FILE...``: prints predicted times."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi4py import MPI

import mpicomm
from mpicomm.bench.contenders import OWN
from mpicomm.bench.measure import Outcome
from mpicomm.bench.model.accuracy import compare, error_of, read_runs
from mpicomm.bench.model.group import DomainTimes, read_group
from mpicomm.bench.model.nccl import ring_us, tree_us
from mpicomm.bench.model.network import Network
from mpicomm.bench.model.schedules import Prediction, System, predict
from mpicomm.bench.operations import OPERATIONS, Case, blocks_of
from mpicomm.bench.options import dtype_and_op
from mpicomm.bench.results import ResultRow, Results
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line

_WIDTHS = (7, 8, 14, 14, 9, 12, 16, 16)
_HEAD = ("nodes", "ranks", "size", "predicted", "busbw", "schedule", "NCCL ring", "NCCL tree")
_UNITS = ("", "", "(B)", "(us)", "(GB/s)", "", "(predicted us)", "(predicted us)")


@dataclass(frozen=True)
class PredictedRow:
    """The predictions for one size and one number of nodes. NCCL's time is None without a measurement of NCCL."""

    nodes: int
    case: Case
    own: Prediction
    ring_us: float | None
    tree_us: float | None

    def line(self) -> str:
        """Return the line of the table."""
        ring, tree = ("-" if time_us is None else f"{time_us:.2f}" for time_us in (self.ring_us, self.tree_us))
        busbw = f"{self.case.busbw_gb_s(self.own.time_us):.2f}"
        facts = (str(self.nodes), str(self.case.size), str(self.case.nbytes))
        return " " + _line((*facts, f"{self.own.time_us:.2f}", busbw, self.own.schedule, ring, tree))

    def record(self) -> dict[str, Any]:
        """Return the row for JSON."""
        return {
            "nodes": self.nodes,
            "ranks": self.case.size,
            "nbytes": self.case.nbytes,
            "predicted_us": self.own.time_us,
            "predicted_busbw_gb_s": self.case.busbw_gb_s(self.own.time_us),
            "schedule": self.own.schedule,
            "predicted_nccl_ring_us": self.ring_us,
            "predicted_nccl_tree_us": self.tree_us,
        }


def main(options: argparse.Namespace) -> int:
    """Print the predictions on rank 0 and write the files. Return the exit status.

    Raises `InvalidUsageError` for files or a collective that the model cannot use, on all ranks, because each rank
    reads the files.
    """
    if options.maxbytes is None:
        options.maxbytes = max(options.minbytes, 1 << 30)
    group, network, collective = read_group(options.sources), options.network, options.collective
    runs = read_runs(options.against) if options.against else []
    rows = predictions(group, network, options, arguments.required_sizes(options))
    about = [
        f"mpicomm {mpicomm.__version__} bench {collective} --model: all times below are PREDICTED, none is measured",
        f"network: {network.gb_s:g} GB/s and {network.latency_us:g} us, as --network says, for each rank's card",
        *group.lines(),
    ]
    command_line.show(
        *(f"# {line}" for line in about), "#", f"#{_line(_HEAD)}", f"#{_line(_UNITS)}", *(row.line() for row in rows)
    )
    compared = compare(runs, lambda nodes, nbytes: predict(System(group, nodes, network), collective, nbytes).time_us)
    for each in compared:
        run = each.run
        command_line.show(
            f"# {run.nodes} nodes, {run.nbytes} B: measured {run.time_us:.2f} us, "
            f"predicted {each.predicted_us:.2f} us, predicted / measured {each.ratio:.2f}"
        )
    error = error_of(compared) if compared else None
    command_line.show(*([f"# {error}"] if error else []))
    if MPI.COMM_WORLD.rank == 0:
        write_files(options, about, rows, error)
    return 0


def predictions(
    group: DomainTimes, network: Network, options: argparse.Namespace, sizes: Sequence[int]
) -> list[PredictedRow]:
    """Return a row for each number of nodes and each size. Raises the errors of `predict`."""
    operation, dtype = OPERATIONS[options.collective], dtype_and_op(options)
    rows = []
    for nodes in options.model:
        system = System(group, nodes, network)
        for block in blocks_of(operation, sizes, dtype, system.size):
            case = Case(operation, dtype, options.op, block, False, 0, system.size)
            call = (system, operation.name, case.nbytes)
            rows.append(PredictedRow(nodes, case, predict(*call), ring_us(*call), tree_us(*call)))
    return rows


def write_files(
    options: argparse.Namespace, about: Sequence[str], rows: Sequence[PredictedRow], error: str | None
) -> None:
    """Write the files that --json and --plot name."""
    if options.json is not None:
        document = {
            "about": about,
            "predicted": True,
            "collective": options.collective,
            "network": {"gb_s": options.network.gb_s, "latency_us": options.network.latency_us},
            "from": [path.name for path in options.sources],
            "error": error,
            "predictions": [row.record() for row in rows],
        }
        arguments.write_json(options.json, document)
    if options.plot is not None:
        from mpicomm.bench.plot import draw  # matplotlib takes a second to import

        draw(as_results(rows), options.plot, f"{options.collective}: predicted, not measured")


def as_results(rows: Sequence[PredictedRow]) -> Results:
    """Return the rows in the form that the plot takes: a line for each number of nodes and each way."""
    results = Results(OWN)
    for row in rows:
        times = {OWN: row.own.time_us, "NCCL ring": row.ring_us, "NCCL tree": row.tree_us}
        outcomes = {
            f"{name}, {row.nodes} nodes,": Outcome(time_us, None, None, "", "")
            for name, time_us in times.items()
            if time_us is not None
        }
        results.rows.append(ResultRow(row.case, {"predicted": outcomes}, {}))
    return results


def _line(cells: Sequence[str]) -> str:
    return "".join(f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
