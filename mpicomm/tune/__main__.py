"""The program ``python -m mpicomm.tune``: measures the algorithms and writes the table."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from mpicomm.api.communicator import Communicator, RankInfo
from mpicomm.bench.machine import machine_of
from mpicomm.bench.measure import Measuring
from mpicomm.bench.operations import DTYPES
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.tuning import Tuning
from mpicomm.devices.base import slowest_gb_s
from mpicomm.errors import InvalidUsageError
from mpicomm.mpi.types import covered_dtype
from mpicomm.tune.sweep import GAIN, NAMES, Timing, subjects_of, sweep

_LAUNCHES = 7


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = arguments.command_parser(
        "tune",
        "Time the algorithms of the collectives on GPU arrays between the started ranks. Write the fastest "
        "for each size to a file from which later runs choose. Other entries of the file stay. Sizes above the largest "
        "measured size keep their algorithm, from that file or from the built-in table.",
        json="",
    )
    arguments.add_sweep_arguments(result, smallest=1 << 10, factor=2, largest=256 << 20)
    result.add_argument(
        "--operations",
        type=arguments.names_from(NAMES, "operation with a choice"),
        default=list(NAMES),
        metavar="NAME,...",
        help=f"default: {','.join(NAMES)}",
    )
    result.add_argument(
        "-d",
        "--datatype",
        choices=DTYPES,
        default="float32",
        metavar="TYPE",
        help="type to measure with; all algorithms of the operations must carry it; default: float32",
    )
    result.add_argument(
        "--output", type=arguments.output_file, metavar="FILE", help="default: the file that later runs look for"
    )
    return result


def require_possible(comm: Communicator, ranks: Sequence[RankInfo]) -> None:
    """Raise `InvalidUsageError`, on all ranks, if there is nothing to choose or no single table for all ranks."""
    if comm.device == "cpu":
        raise InvalidUsageError(
            "the table is for collectives on GPU arrays, and these ranks are on the cpu, which needs no table: start "
            "them on GPUs"
        )
    if comm.size == 1 or comm.num_nodes > 1:
        raise InvalidUsageError(
            f"the table is for 2 or more ranks of one node, these are {comm.size} on {comm.num_nodes}: start them with "
            "mpirun -np N on one machine"
        )
    names = sorted({info.device_name for info in ranks})
    if len(names) > 1:
        raise InvalidUsageError(f"a table is for one kind of GPU, the ranks are on {' and '.join(names)}: tune each")


def open_table(output: Path | None, device: str) -> tuple[Path, Tuning]:
    """Return the file to write and the table in it. Raises `InvalidUsageError`."""
    path = output or tuning.default_file(device)
    if path is None:
        raise InvalidUsageError("this user has no cache directory to keep the table in: name a file with --output")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments.output_file(str(path))
    except (OSError, argparse.ArgumentTypeError) as error:
        raise InvalidUsageError(f"the table cannot be kept: {error}; name another file with --output") from error
    if not path.exists():
        return path, Tuning(f"{path} ({device})", (), device)
    table = tuning.load(path)
    if table.device != device:
        raise InvalidUsageError(f"{path} is for {table.device}, this is {device}: name another file with --output")
    return path, table


def main() -> int:
    """Run the command line on this rank. Collective."""
    # All calls name their algorithm, so a broken file must not stop the run. `find` returns the built-in table.
    os.environ["MPICOMM_TUNING"] = "off"
    run = command_line.Run(parser())
    options, comm, ranks = run.options, run.comm, run.ranks
    require_possible(comm, ranks)
    subjects = subjects_of(options.operations, covered_dtype(options.datatype))
    swept = run.swept_sizes()
    path, table = command_line.on_first_rank(comm, lambda: open_table(options.output, ranks[0].device_name))
    before = table.completed(tuning.find(ranks[0].device_name, lambda: slowest_gb_s(ranks[0].links)))

    run.introduce(
        "tune",
        f"timed: {_LAUNCHES} launches of a graph of {options.iters} calls, slowest rank, median; a change of algorithm "
        f"has to gain {GAIN:.0%}",
        "",
    )
    longest = max(swept[-1], 8 * comm.size)  # at least one element for each rank
    effort = {"iterations": options.iters, "warmups": max(1, options.warmup_iters), "rounds": _LAUNCHES}
    timing = Timing(Measuring(comm, machine_of(comm), **effort, graphs=True), longest)
    results = [
        sweep(subject, subject.cases(swept, comm.rank, comm.size), timing.of(subject), before) for subject in subjects
    ]
    comm.Free()

    wrong = sum(count for _, count in results)
    if wrong:
        command_line.show(f"# FAILED: {wrong} wrong; nothing was written")
        return 1
    table = table.updated(row for row, _ in results)
    command_line.save(path, tuning.to_json(table))
    command_line.show("# wrote", *(f"# {line}" for line in table.describe()), "# OK")
    return 0


if __name__ == "__main__":
    command_line.run(main)
