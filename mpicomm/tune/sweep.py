"""Measures a subject size by size, and makes a row of the table from the times."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone

import mpicomm
from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import Case
from mpicomm.cli import options as command_line
from mpicomm.collectives.gpu.tuning import Measured, Row, Tuning
from mpicomm.errors import MpicommError
from mpicomm.tune.subjects import Subject

GAIN = 0.03
"""The least gain for which the algorithm changes, because two runs on the same machine differ by as much."""

Measure = Callable[[Case], tuple[Mapping[str, Outcome], Mapping[str, str]]]
"""Measures a case: returns the outcome of each algorithm, or the reason why it has none, as `Measuring.run` does."""


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
    command_line.show(*_head(subject))
    choices: list[tuple[int, str]] = []
    times_us: dict[int, dict[str, float]] = {}
    notes: dict[str, None] = {}
    wrong = 0
    for case in cases:
        outcomes, silent = measure(case)
        notes.update({f"- {name}: {reason}": None for name, reason in silent.items()})
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
        command_line.show(_line(subject, case, outcomes, chosen))
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    measured = Measured(date, mpicomm.__version__, subject.dtype.name, times_us)
    row = before.continued(Row(subject.kind, cases[0].size, tuple(choices), measured))
    kept = [f"{name} from {begin} B" for begin, name in row.choices[len(choices) :]]
    if kept:
        command_line.show(f"# not measured, as before: {', '.join(kept)}")
    command_line.show(*(f"# {note}" for note in notes), "#")
    return row, wrong


def _head(subject: Subject) -> list[str]:
    columns = "".join(f"{name:>13}" for name in (*subject.algorithms, "chosen"))
    units = f"{'(us)':>13}" * len(subject.algorithms)
    return [f"# {subject}", f"#{'size':>12}{columns}", f"#{'(B)':>12}{units}"]


def _line(subject: Subject, case: Case, outcomes: Mapping[str, Outcome], chosen: str) -> str:
    """Return a line. A star marks a time of calls that were issued one by one although the user asked for graphs."""
    cells = [
        f"{outcomes[name].time_us:.2f}{'*' if outcomes[name].eager else ''}" if name in outcomes else "-"
        for name in subject.algorithms
    ]
    return f"{case.nbytes:>13}" + "".join(f"{cell:>13}" for cell in (*cells, chosen))
