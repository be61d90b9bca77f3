"""``python -m mpicomm.tune``: times the algorithms of the collectives on this machine's GPUs and keeps the fastest."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

import mpicomm
from mpicomm.api.communicator import Communicator, RankInfo
from mpicomm.bench import compare
from mpicomm.bench.compare import Mpicomm
from mpicomm.bench.measure import Measured, Measuring, machine_of
from mpicomm.bench.operations import OPERATIONS, BenchOperation, Case, Content, blocks_of
from mpicomm.bench.report import format_time
from mpicomm.cli import arguments
from mpicomm.cli import options as command_line
from mpicomm.collectives.gpu import tuning
from mpicomm.collectives.gpu.tuning import TUNED, Kind, Row, Tuning, algorithms_of, kind_of
from mpicomm.devices.base import slowest_gb_s
from mpicomm.errors import InvalidUsageError, MpicommError
from mpicomm.sizes import Columns

_LAUNCHES = 7
GAIN = 0.03
"""The least gain for which the algorithm changes, because two runs on the same machine differ by as much."""

Measure = Callable[[Case], Measured]
"""Measures the algorithms in a case."""

# Reductions are measured as sums of this type, which all algorithms support.
_OP, _DTYPE = "sum", np.dtype(np.float32)

_TUNED = {
    name: operation.collective.name
    for name, operation in OPERATIONS.items()
    if operation.collective is not None and operation.collective.name in TUNED
}
NAMES = tuple(_TUNED)
"""The collectives with a choice of algorithms, by the bench's names."""


class Subject(NamedTuple):
    """The kind of calls that a row of the table is for, and the operation for its measurement."""

    kind: Kind
    operation: BenchOperation

    @property
    def algorithms(self) -> tuple[str, ...]:
        """The algorithms from which the table chooses."""
        return algorithms_of(self.kind.operation)

    def __str__(self) -> str:
        return f"{self.kind.operation} of {_DTYPE}, {'symmetric' if self.kind.registered else 'ordinary'} arrays"

    def cases(self, sizes: Sequence[int], rank: int, size: int) -> list[Case]:
        """Return the cases nearest to these sizes, out of place if the operation allows it."""
        blocks = blocks_of(self.operation, sizes, _DTYPE, size)
        place = self.operation.places[0]
        return [Case(self.operation, _DTYPE, _OP, block, False, rank, size).at(place) for block in blocks]


def subjects_of(names: Sequence[str]) -> list[Subject]:
    """Return the subjects of the collectives ``names``, by the bench's names."""
    named = [(kind_of(_TUNED[name], registered=registered), name) for name, registered in product(names, (False, True))]
    return [Subject(kind, OPERATIONS[name]) for kind, name in dict(named).items()]


def measures(measuring: Measuring, nbytes: int) -> Callable[[Subject], Measure]:
    """Return a function that returns how to measure cases of a subject, in arrays of ``nbytes``. Collective.

    The bench checks and times each algorithm as if it were another library. An algorithm that fails on some rank has a
    reason in place of an outcome. An error that makes the communicator unusable is raised.
    """
    comm, machine = measuring.comm, measuring.machine

    def library(algorithm: str, registered: bool) -> Mpicomm:
        return Mpicomm(comm, machine, symmetric=registered, algorithm=algorithm).named(algorithm, 0)

    arrays = [[library("auto", registered).allocate(nbytes) for _ in range(2)] for registered in (False, True)]
    with machine.current():
        content = Content(machine.xp, _DTYPE, _OP, comm.size, nbytes // _DTYPE.itemsize, reduces=True)

    def measure_of(subject: Subject) -> Measure:
        libraries = [library(algorithm, subject.kind.registered) for algorithm in subject.algorithms]
        for each in libraries:
            each.first, each.second = arrays[subject.kind.registered]

        def measure(case: Case) -> Measured:
            found = compare.measure(measuring, libraries, content, case, checks=1)
            comm.check(machine.stream)
            return found

        return measure

    return measure_of


def choose(current: str | None, times_us: Mapping[str, float]) -> str:
    """Return the fastest algorithm, or the current one if a change gains too little."""
    best = min(times_us, key=times_us.__getitem__)
    if current is not None and times_us[best] > (1 - GAIN) * times_us.get(current, math.inf):
        return current
    return best


def sweep(subject: Subject, cases: Sequence[Case], measure: Measure, before: Tuning) -> tuple[Row, int]:
    """Measure ascending cases of a subject and print them. Return the row, and the number of wrong elements.

    Larger sizes keep the algorithms of the table ``before``. Collective, as ``measure`` is. Raises `MpicommError` if no
    algorithm works.
    """
    names = subject.algorithms
    table = Columns([("size", "(B)", 13), *((name, "(us)", 13) for name in names), ("chosen", "", 13)])
    command_line.show(f"# {subject}", *table.head())
    choices: list[tuple[int, str]] = []
    times_us: dict[int, dict[str, float]] = {}
    notes: dict[str, None] = {}
    wrong = 0
    for case in command_line.tracked(cases, str(subject)):
        outcomes, failures = measure(case)
        notes.update({f"- {name}: {reason}": None for name, reason in failures.items()})
        for name, outcome in outcomes.items():
            if outcome.eager:
                notes[f"* {name}, call by call: {outcome.eager}"] = None
            if outcome.wrong:
                notes[f"- {name}: {outcome.wrong} wrong at {case.nbytes} B"] = None
                wrong += outcome.wrong
        if not outcomes:
            raise MpicommError(f"{subject}: no algorithm works: {'; '.join(notes)}")
        times_us[case.nbytes] = {name: outcome.time_us for name, outcome in outcomes.items()}
        current = choices[-1][1] if choices else None
        chosen = choose(current, times_us[case.nbytes])
        if chosen != current:
            choices.append((case.nbytes if choices else 0, chosen))
        cells = [format_time(outcomes[name]) if name in outcomes else None for name in names]
        command_line.show(table.line((case.nbytes, *cells, chosen)))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    times = [{"nbytes": nbytes, "us": each} for nbytes, each in times_us.items()]
    measured = {"date": date, "mpicomm": mpicomm.__version__, "datatype": _DTYPE.name, "times": times}
    row = before.continued(Row(subject.kind, cases[0].size, tuple(choices), measured))
    kept = [f"{name} from {begin} B" for begin, name in row.choices[len(choices) :]]
    if kept:
        command_line.show(f"# not measured, as before: {', '.join(kept)}")
    command_line.show(*(f"# {note}" for note in notes), "#")
    return row, wrong


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
    add, names, listed = result.add_argument, arguments.names_from(NAMES, "operation with a choice"), ",".join(NAMES)
    add("--operations", type=names, default=list(NAMES), metavar="NAME,...", help=f"default: {listed}")
    written = "default: the file that later runs look for"
    add("--output", type=arguments.output_file, metavar="FILE", help=written)
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
    swept = run.swept_sizes()
    path, table = command_line.on_first_rank(comm, lambda: open_table(options.output, ranks[0].device_name))
    before = table.completed(tuning.find(ranks[0].device_name, lambda: slowest_gb_s(ranks[0].links)))

    run.print_header(
        "tune",
        f"timed: {_LAUNCHES} launches of a graph of {options.iters} calls, slowest rank, median; a change of algorithm "
        f"has to gain {GAIN:.0%}",
        "",
    )
    longest = max(swept[-1], 8 * comm.size)  # at least one element for each rank
    effort = {"iterations": options.iters, "warmups": max(1, options.warmup_iters), "rounds": _LAUNCHES}
    measure_of = measures(Measuring(comm, machine_of(comm), **effort, graphs=True), longest)
    results = [
        sweep(subject, subject.cases(swept, comm.rank, comm.size), measure_of(subject), before)
        for subject in subjects_of(options.operations)
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
