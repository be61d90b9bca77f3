"""The report of all benches: the table in nccl-tests' form, the lines below it, and the JSON document."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple, TypeVar

from mpicomm.bench.measure import Outcome
from mpicomm.bench.peers import OWN, UNCODED, Peer, close
from mpicomm.cli import options as command_line
from mpicomm.sizes import Columns, format_cell

T = TypeVar("T")


class ResultRow(NamedTuple):
    """One line of the table: outcomes by place and contender, and the reason of each contender without one.

    A place is a group of columns, such as calls in place.
    """

    name: str
    facts: Mapping[str, Any]
    """What was measured. The first facts are in the table, too."""
    outcomes: Mapping[str, Mapping[str, Outcome]]
    silent: Mapping[str, Mapping[str, str]]
    rates: Callable[[str, float], Mapping[str, float]] = lambda place, time_us: {}
    """Returns the bandwidths of a time in a place, in GB/s, by name."""


class Table:
    """The table for these places and contenders beside mpicomm. ``facts`` are the first columns.

    With ``issue`` a column has the time for which a call holds the caller. ``+-`` is the spread of the rounds of
    mpicomm. Each other contender has two columns: its time, and this time divided by mpicomm's.
    """

    def __init__(
        self,
        facts: Sequence[tuple[str, str, int]],
        places: Sequence[str],
        others: Sequence[str],
        rates: Sequence[str] = (),
        *,
        issue: bool = False,
    ) -> None:
        self._facts, self._places, self._others, self._issue = facts, places, others, issue
        self._own = [("issue", "(us)", 10)] if issue else []
        self._own += [("time", "(us)", 10), ("+-", "(%)", 6), *((rate, "(GB/s)", 9) for rate in rates)]
        self._own += [("#wrong", "", 8)]
        self._widths = [max(17, len(name) + 2) for name in others]
        of_place = [*self._own]
        for width in self._widths:
            of_place += [("time", "(us)", width - 7), ("ratio", "", 7)]
        self._columns = Columns([*facts, *of_place * len(places)])

    def head(self) -> list[str]:
        """Return the lines above the rows."""
        own_width = sum(width for *_, width in self._own)
        names = "".join(f"{name:>{width}}" for name, width in zip(self._others, self._widths, strict=True))
        places = "".join(f"{place:^{own_width}}{names}" for place in self._places)
        return [f"#{' ' * (sum(width for *_, width in self._facts) - 1)}{places}".rstrip(), *self._columns.head()]

    def line(self, row: ResultRow) -> str:
        """Return the line of a row."""
        cells = [*row.facts.values()][: len(self._facts)]
        for place in self._places:
            found = row.outcomes[place]
            mine = found[OWN]
            cells += [mine.issue_us] if self._issue else []
            cells += [format_time(mine), f"{mine.spread:.0%}"[:-1], *row.rates(place, mine.time_us).values()]
            cells.append("N/A" if mine.wrong is None else mine.wrong)
            for name in self._others:
                other = found.get(name)
                cells += [format_time(other), other.time_us / mine.time_us] if other else [None, None]
        return self._columns.line(cells)


def format_time(outcome: Outcome) -> str:
    """Return a time. A star marks calls that were issued one by one although the user asked for graphs."""
    return format_cell(outcome.time_us) + ("*" if outcome.eager else "")


@dataclass
class Results:
    """The rows. ``compared`` are the contenders whose ratios count; others are parts of a call, or limits."""

    compared: Sequence[str]
    own: Sequence[str] = (OWN,)
    """The contenders of mpicomm, whose wrong elements fail the run."""
    rows: list[ResultRow] = field(default_factory=list)

    def wrong(self) -> dict[str, int]:
        """Return the number of wrong elements of each contender that has some."""
        total: dict[str, int] = {}
        for _, _, name, outcome in self._outcomes():
            total[name] = total.get(name, 0) + (outcome.wrong or 0)
        return {name: count for name, count in total.items() if count}

    def ratios(self) -> dict[str, dict[str, list[float]]]:
        """Return time / mpicomm's time in each row, by compared contender and place."""
        ratios: dict[str, dict[str, list[float]]] = {}
        for row, place, name, outcome in self._outcomes():
            if name in self.compared:
                ratio = outcome.time_us / row.outcomes[place][OWN].time_us
                ratios.setdefault(name, {}).setdefault(place, []).append(ratio)
        return ratios

    def geometric_means(self) -> dict[str, dict[str, float]]:
        """Return the geometric means of `ratios`, by contender and place."""
        of_all = self.ratios()
        return {name: {at: geometric_mean(of) for at, of in places.items()} for name, places in of_all.items()}

    def footer(self) -> list[str]:
        """Return the lines below the table."""
        rates = [row.rates(place, found[OWN].time_us) for row in self.rows for place, found in row.outcomes.items()]
        busbw = [each["busbw"] for each in rates if "busbw" in each]
        lines = [f"Avg bus bandwidth    : {fmean(busbw):.3f}"] if busbw else []  # as nccl-tests does
        for name, places in self.ratios().items():
            said = ", ".join(f"{place} {geometric_mean(of):.3f} ({len(of)} rows)" for place, of in places.items())
            lines.append(f"{name} / {OWN}, geometric mean: {said}")
        eager = {outcome.eager: name for _, _, name, outcome in self._outcomes() if outcome.eager}
        lines += [f"* {name} is timed call by call: {reason}" for reason, name in eager.items()]
        silent = (reasons.items() for row in self.rows for reasons in row.silent.values())
        lines += dict.fromkeys(f"- {name}: {reason}" for each in silent for name, reason in each)
        lines += [f"{name}: {count} wrong" for name, count in self.wrong().items() if name not in self.own]
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
                    place: {name: record(row, place, outcome) for name, outcome in found.items()}
                    for place, found in row.outcomes.items()
                },
                "missing": {place: dict(reasons) for place, reasons in row.silent.items() if reasons},
            }
            for row in self.rows
        ]

    def report(
        self,
        run: command_line.Run,
        name: str,
        lines: Sequence[str],
        table: Table,
        cases: Sequence[T],
        measure: Callable[[T], ResultRow],
        contenders: Sequence[Peer],
        absent: Mapping[str, str],
    ) -> int:
        """Measure all cases, print the table, save the document, and close all. Return the exit code. Collective.

        The ``lines`` above the table begin with how calls are timed. Then come the libraries.
        """
        run.introduce(
            f"bench {name}",
            f"timed: {lines[0]}, slowest rank, median",
            *(f"{each.name} {each.version}" for each in contenders if not each.own),
            *(f"{peer}: {reason}" for peer, reason in absent.items()),
            *(["multicast (NVLink SHARP) is off for all"] if run.comm.device != "cpu" else []),
            *lines[1:],
            "",
        )
        command_line.show(*table.head())
        for case in command_line.tracked(cases, name):
            self.rows.append(measure(case))
            command_line.show(table.line(self.rows[-1]))
        command_line.show(*(f"# {line}" for line in self.footer()))
        document = {
            "collective": name,
            "multicast": False,
            "peers": {each.name: each.version for each in contenders if not each.own or each.name == UNCODED},
            "missing": absent,
            "results": self.document(),
            "geometric_means": self.geometric_means(),
        }
        wrong = sum(count for name, count in self.wrong().items() if name in self.own)
        return run.finish(document, wrong, close=lambda: close(contenders))

    def _outcomes(self) -> list[tuple[ResultRow, str, str, Outcome]]:
        return [
            (row, place, name, outcome)
            for row in self.rows
            for place, found in row.outcomes.items()
            for name, outcome in found.items()
        ]
