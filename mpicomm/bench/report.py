"""The report of a run: the table in nccl-tests' form, the lines below it, and the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import ROOT, Case
from mpicomm.sizes import Columns, format_cell

_NOISE = 0.03  # two runs on the same machine differ by as much


class Table:
    """The table for these places and peers. With ``issue`` a column has the time for which a call holds the caller.

    ``+-`` is the spread of the rounds of mpicomm. Each other library has two columns: its time, and this time divided
    by mpicomm's.
    """

    def __init__(self, places: Sequence[str], peers: Sequence[str], *, issue: bool) -> None:
        self._places, self._peers, self._issue = places, peers, issue
        self._case = [
            ("size", "(B)", 12),
            ("count", "(elements)", 13),
            ("type", "", 15),
            ("redop", "", 7),
            ("root", "", 6),
        ]
        self._own = [("issue", "(us)", 10)] if issue else []
        self._own += [("time", "(us)", 10), ("+-", "(%)", 6)]
        self._own += [("algbw", "(GB/s)", 9), ("busbw", "(GB/s)", 9), ("#wrong", "", 8)]
        self._widths = [max(17, len(peer) + 2) for peer in peers]
        of_place = [*self._own]
        for width in self._widths:
            of_place += [("time", "(us)", width - 7), ("ratio", "", 7)]
        self._columns = Columns([*self._case, *of_place * len(places)])

    def head(self) -> list[str]:
        """Return the lines above the rows."""
        own_width = sum(width for *_, width in self._own)
        names = "".join(f"{peer:>{width}}" for peer, width in zip(self._peers, self._widths, strict=True))
        places = "".join(f"{place:^{own_width}}{names}" for place in self._places)
        return [f"#{' ' * (sum(width for *_, width in self._case) - 1)}{places}".rstrip(), *self._columns.head()]

    def row(self, case: Case, outcomes: Mapping[str, Mapping[str, Outcome]], own: str) -> str:
        """Return the line for outcomes by place and contender. It compares the others with ``own``."""
        operation = case.operation
        cells: list[object] = [case.nbytes, case.count, case.dtype.name, case.op if operation.reduces else "none"]
        cells.append(ROOT if operation.rooted else -1)
        for place in self._places:
            found = outcomes.get(place, {})
            mine = found[own]
            cells += [mine.issue_us] if self._issue else []
            cells += [format_time(mine), f"{mine.spread:.0%}"[:-1]]
            cells += [case.algbw_gb_s(mine.time_us), case.busbw_gb_s(mine.time_us)]
            cells.append("N/A" if mine.wrong is None else mine.wrong)
            for peer in self._peers:
                other = found.get(peer)
                cells += [format_time(other), other.time_us / mine.time_us] if other else [None, None]
        return self._columns.line(cells)


def format_time(outcome: Outcome) -> str:
    """Return a time. A star marks calls that were issued one by one although the user asked for graphs."""
    return format_cell(outcome.time_us) + ("*" if outcome.eager else "")


@dataclass(frozen=True)
class ResultRow:
    """One line of the table: outcomes by place and contender, and the reason of each contender without one."""

    case: Case
    outcomes: Mapping[str, Mapping[str, Outcome]]
    silent: Mapping[str, Mapping[str, str]]


@dataclass
class Results:
    """The rows. ``own`` is the name of mpicomm in them."""

    own: str
    rows: list[ResultRow] = field(default_factory=list)

    def wrong(self) -> dict[str, int]:
        """Return the number of wrong elements of each contender that has some."""
        total: dict[str, int] = {}
        for _, _, name, outcome in self._outcomes():
            total[name] = total.get(name, 0) + (outcome.wrong or 0)
        return {name: count for name, count in total.items() if count}

    def ratios(self) -> dict[str, dict[str, dict[int, float]]]:
        """Return time / mpicomm's time by contender, place and size."""
        ratios: dict[str, dict[str, dict[int, float]]] = {}
        for row, place, name, outcome in self._outcomes():
            if name != self.own:
                of_place = ratios.setdefault(name, {}).setdefault(place, {})
                of_place[row.case.nbytes] = outcome.time_us / row.outcomes[place][self.own].time_us
        return ratios

    def geometric_means(self) -> dict[str, dict[str, float]]:
        """Return the geometric means of `ratios`, by contender and place."""
        of_all = self.ratios()
        return {name: {at: geometric_mean(of.values()) for at, of in places.items()} for name, places in of_all.items()}

    def footer(self) -> list[str]:
        """Return the lines below the table."""
        own = [(row.case, outcome) for row, _, name, outcome in self._outcomes() if name == self.own]
        average = sum(case.busbw_gb_s(outcome.time_us) for case, outcome in own) / len(own)  # as nccl-tests does
        lines = [f"Avg bus bandwidth    : {average:.3f}"]
        means = self.geometric_means()
        for name, places in self.ratios().items():
            said = ", ".join(f"{place} {means[name][place]:.3f} ({len(of)} sizes)" for place, of in places.items())
            lines.append(f"{name} / {self.own}, geometric mean: {said}")
            faster = [(ratio, nbytes, at) for at, of in places.items() for nbytes, ratio in of.items()]
            faster = [each for each in faster if each[0] < 1 - _NOISE]
            if faster:
                ratio, nbytes, place = min(faster)
                lines.append(f"  faster at {len(faster)} of them, most at {nbytes} B {place}: {ratio:.2f}")
        eager = {outcome.eager: name for _, _, name, outcome in self._outcomes() if outcome.eager}
        lines += [f"* {name} is timed call by call: {reason}" for reason, name in eager.items()]
        silent = (reasons.items() for row in self.rows for reasons in row.silent.values())
        lines += dict.fromkeys(f"- {name}: {reason}" for each in silent for name, reason in each)
        lines += [f"{name}: {count} wrong" for name, count in self.wrong().items() if name != self.own]
        return lines

    def document(self) -> list[dict[str, Any]]:
        """Return the rows for JSON."""
        return [
            {
                "nbytes": row.case.nbytes,
                "count": row.case.count,
                "dtype": row.case.dtype.name,
                "op": row.case.op if row.case.operation.reduces else None,
                "root": ROOT if row.case.operation.rooted else None,
                "places": {
                    place: {
                        name: {
                            **asdict(outcome),
                            "algbw_gb_s": row.case.algbw_gb_s(outcome.time_us),
                            "busbw_gb_s": row.case.busbw_gb_s(outcome.time_us),
                        }
                        for name, outcome in found.items()
                    }
                    for place, found in row.outcomes.items()
                },
                "missing": {place: dict(reasons) for place, reasons in row.silent.items() if reasons},
            }
            for row in self.rows
        ]

    def _outcomes(self) -> list[tuple[ResultRow, str, str, Outcome]]:
        return [
            (row, place, name, outcome)
            for row in self.rows
            for place, found in row.outcomes.items()
            for name, outcome in found.items()
        ]
