"""The report of all benches: the table in nccl-tests' form, the lines below it, and the JSON document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple, TypeVar

from mpicomm.bench.compare import OWN, UNQUANTIZED, Library
from mpicomm.bench.measure import Measured, Outcome
from mpicomm.cli import options as command_line
from mpicomm.sizes import Columns, format_cell

T = TypeVar("T")


class ResultRow(NamedTuple):
    """One line of the table. A place is a group of columns, such as calls in place."""

    facts: Mapping[str, Any]
    """What was measured. The first facts are in the table, too."""
    places: Mapping[str, Measured]
    rates: Callable[[str, float], Mapping[str, float]] = lambda place, time_us: {}
    """Returns the bandwidths of a time in a place, in GB/s, by name."""

    def own(self, place: str) -> Outcome:
        """Return the outcome of mpicomm."""
        return self.places[place].outcomes[OWN]


class Report:
    """A table with a group of columns for each place, after ``facts``. ``own`` are the libraries that are mpicomm.

    With ``issue`` a column has the time for which a call holds the caller. ``+-`` is the spread of the rounds of
    mpicomm. Each other library has two columns: its time, and this time divided by mpicomm's. First come ``parts`` of
    a call and limits, whose ratios do not count, and then the others, ``compared``. Wrong elements of mpicomm fail
    the run.
    """

    def __init__(
        self,
        facts: Sequence[tuple[str, str, int]],
        places: Sequence[str],
        compared: Sequence[str] = (),
        rates: Sequence[str] = (),
        *,
        parts: Sequence[str] = (),
        own: Sequence[str] = (OWN,),
        issue: bool = False,
    ) -> None:
        self._facts, self._places, self._compared, self._own, self._issue = facts, places, compared, own, issue
        self._others = [*parts, *compared]
        mine = [("issue", "(us)", 10)] if issue else []
        mine += [("time", "(us)", 10), ("+-", "(%)", 6), *((rate, "(GB/s)", 9) for rate in rates), ("#wrong", "", 8)]
        widths = [max(17, len(name) + 2) for name in self._others]
        pairs = [column for width in widths for column in (("time", "(us)", width - 7), ("ratio", "", 7))]
        self._columns = Columns([*facts, *[*mine, *pairs] * len(places)])
        own_width, first_width = (sum(width for *_, width in columns) for columns in (mine, facts))
        names = "".join(f"{name:>{width}}" for name, width in zip(self._others, widths, strict=True))
        of_places = "".join(f"{place:^{own_width}}{names}" for place in places)
        self._first_line = f"#{' ' * (first_width - 1)}{of_places}".rstrip()
        self.rows: list[ResultRow] = []

    def head(self) -> list[str]:
        """Return the lines above the rows."""
        return [self._first_line, *self._columns.head()]

    def line(self, row: ResultRow) -> str:
        """Return the line of a row."""
        cells = [*row.facts.values()][: len(self._facts)]
        for place in self._places:
            mine = row.own(place)
            cells += [mine.issue_us] if self._issue else []
            cells += [format_time(mine), f"{mine.spread:.0%}"[:-1], *row.rates(place, mine.time_us).values()]
            cells.append("N/A" if mine.wrong is None else mine.wrong)
            for name in self._others:
                other = row.places[place].outcomes.get(name)
                cells += [format_time(other), other.time_us / mine.time_us] if other else [None, None]
        return self._columns.line(cells)

    def wrong(self) -> dict[str, int]:
        """Return the number of wrong elements of each library that has some."""
        total: dict[str, int] = {}
        for _, _, name, outcome in self._outcomes():
            total[name] = total.get(name, 0) + (outcome.wrong or 0)
        return {name: count for name, count in total.items() if count}

    def ratios(self) -> dict[str, dict[str, list[float]]]:
        """Return time / mpicomm's time in each row, by compared library and place."""
        ratios: dict[str, dict[str, list[float]]] = {}
        for row, place, name, outcome in self._outcomes():
            if name in self._compared:
                ratio = outcome.time_us / row.own(place).time_us
                ratios.setdefault(name, {}).setdefault(place, []).append(ratio)
        return ratios

    def geometric_means(self) -> dict[str, dict[str, float]]:
        """Return the geometric means of `ratios`, by library and place."""
        of_all = self.ratios()
        return {name: {at: geometric_mean(of) for at, of in places.items()} for name, places in of_all.items()}

    def footer(self) -> list[str]:
        """Return the lines below the table."""
        rates = [row.rates(place, row.own(place).time_us) for row in self.rows for place in row.places]
        busbw = [each["busbw"] for each in rates if "busbw" in each]
        lines = [f"Avg bus bandwidth    : {fmean(busbw):.3f}"] if busbw else []  # as nccl-tests does
        for name, places in self.ratios().items():
            said = ", ".join(f"{place} {geometric_mean(of):.3f} ({len(of)} rows)" for place, of in places.items())
            lines.append(f"{name} / {OWN}, geometric mean: {said}")
        eager = {outcome.eager: name for _, _, name, outcome in self._outcomes() if outcome.eager}
        lines += [f"* {name} is timed call by call: {reason}" for reason, name in eager.items()]
        failures = (measured.failures.items() for row in self.rows for measured in row.places.values())
        lines += dict.fromkeys(f"- {name}: {reason}" for each in failures for name, reason in each)
        lines += [f"{name}: {count} wrong" for name, count in self.wrong().items() if name not in self._own]
        return lines

    def document(self) -> list[dict[str, Any]]:
        """Return the rows for JSON."""

        def record(row: ResultRow, place: str, outcome: Outcome) -> dict[str, Any]:
            rates = row.rates(place, outcome.time_us)
            return {**asdict(outcome), **{f"{name}_gb_s": rate for name, rate in rates.items()}}

        return [
            {
                **row.facts,
                "places": {
                    place: {name: record(row, place, outcome) for name, outcome in outcomes.items()}
                    for place, (outcomes, _) in row.places.items()
                },
                "missing": {place: failures for place, (_, failures) in row.places.items() if failures},
            }
            for row in self.rows
        ]

    def make(
        self,
        run: command_line.Run,
        command: str,
        lines: Sequence[str],
        cases: Sequence[T],
        measure: Callable[[T], ResultRow],
        libraries: Sequence[Library] = (),
        absent: Mapping[str, str] | None = None,
    ) -> int:
        """Measure all cases, print the table, save the document, and close all. Return the exit code. Collective.

        The ``lines`` above the table begin with how calls are timed. Then come the libraries, and those ``absent``.
        """
        others, absent = [each for each in libraries if not each.own], absent or {}
        run.print_header(
            command,
            f"timed: {lines[0]}, slowest rank, median",
            *(f"{each.name} {each.version}" for each in others),
            *(f"{name}: {reason}" for name, reason in absent.items()),
            *(["multicast (NVLink SHARP) is off for all"] if others and run.comm.device != "cpu" else []),
            *lines[1:],
            "",
        )
        command_line.show(*self.head())
        for case in command_line.tracked(cases, command):
            self.rows.append(measure(case))
            command_line.show(self.line(self.rows[-1]))
        command_line.show(*(f"# {line}" for line in self.footer()))
        document = {
            "collective": command.removeprefix("bench "),
            "multicast": False,
            "peers": {each.name: each.version for each in libraries if each in others or each.name == UNQUANTIZED},
            "missing": absent,
            "results": self.document(),
            "geometric_means": self.geometric_means(),
        }
        wrong = sum(count for name, count in self.wrong().items() if name in self._own)

        def close() -> None:
            for library in reversed(libraries):
                library.first = library.second = None
                # Keep the results even if closing another library fails.
                with nullcontext() if library.own else suppress(Exception):
                    library.close()

        return run.finish(document, wrong, close)

    def _outcomes(self) -> list[tuple[ResultRow, str, str, Outcome]]:
        return [
            (row, place, name, outcome)
            for row in self.rows
            for place, measured in row.places.items()
            for name, outcome in measured.outcomes.items()
        ]


def format_time(outcome: Outcome) -> str:
    """Return a time. A star marks calls that were issued one by one although the user asked for graphs."""
    return format_cell(outcome.time_us) + ("*" if outcome.eager else "")
