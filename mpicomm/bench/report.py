"""The report of a run: the table in nccl-tests' form, the lines below it, and the JSON document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import geometric_mean
from typing import Any

from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import ROOT, Case
from mpicomm.sizes import format_cell, format_line

_PEER_WIDTHS = (10, 7)
_NOISE = 0.03  # two runs on the same machine differ by as much


class Table:
    """The layout for these places and peers. With ``issue`` a column has the time for which a call holds the caller.

    Each other library has two columns: its time, and this time divided by mpicomm's.
    """

    def __init__(self, places: Sequence[str], peers: Sequence[str], *, issue: bool) -> None:
        self._places, self._peers, self._issue = places, peers, issue
        own = [("issue", "(us)", 10)] if issue else []
        own += [("time", "(us)", 10), ("algbw", "(GB/s)", 9), ("busbw", "(GB/s)", 9), ("#wrong", "", 8)]
        self._groups = [(sum(width for *_, width in own), own)]
        for peer in peers:
            width = max(sum(_PEER_WIDTHS), len(peer) + 2)
            self._groups.append((width, [("time", "(us)", width - _PEER_WIDTHS[1]), ("ratio", "", _PEER_WIDTHS[1])]))

    def head(self) -> list[str]:
        """Return the lines above the rows."""
        columns = [
            ("size", "(B)", 11),
            ("count", "(elements)", 13),
            ("type", "", 15),
            ("redop", "", 7),
            ("root", "", 6),
        ]
        titles = " " * sum(width for *_, width in columns)
        for place in self._places:
            for title, (width, group) in zip((place, *self._peers), self._groups, strict=True):
                titles += f"{title:^{width}}" if title == place else f"{title:>{width}}"
                columns += group
        names, units = ("".join(f"{column[row]:>{column[2]}}" for column in columns) for row in (0, 1))
        return [titles, names, units]

    def row(self, case: Case, outcomes: Mapping[str, Mapping[str, Outcome]], own: str) -> str:
        """Return the line for outcomes by place and contender. It compares the others with ``own``."""
        operation = case.operation
        cells: list[object] = [case.nbytes, case.count, case.dtype.name, case.op if operation.reduces else "none"]
        cells.append(ROOT if operation.rooted else -1)
        for place in self._places:
            found = outcomes.get(place, {})
            mine = found[own]
            bandwidths = (case.algbw_gb_s(mine.time_us), case.busbw_gb_s(mine.time_us))
            cells += [mine.issue_us] if self._issue else []
            cells += [format_time(mine), *bandwidths, "N/A" if mine.wrong is None else mine.wrong]
            for peer in self._peers:
                other = found.get(peer)
                cells += [format_time(other), other.time_us / mine.time_us] if other else [None, None]
        widths = [width for _, group in self._groups for *_, width in group]
        return format_line(cells, [12, 13, 15, 7, 6, *widths * len(self._places)])


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

    def geometric_means(self) -> dict[str, dict[str, tuple[float, int]]]:
        """Return, by contender and place, the geometric mean of time / mpicomm's time, and the number of sizes."""
        ratios: dict[str, dict[str, list[float]]] = {}
        for row, place, name, outcome in self._outcomes():
            if name != self.own:
                ratio = outcome.time_us / row.outcomes[place][self.own].time_us
                ratios.setdefault(name, {}).setdefault(place, []).append(ratio)
        return {
            name: {place: (geometric_mean(found), len(found)) for place, found in places.items()}
            for name, places in ratios.items()
        }

    def slower(self) -> dict[str, list[tuple[int, str, float]]]:
        """Return the size, place and ratio of each row in which a contender beats mpicomm by more than noise."""
        found: dict[str, list[tuple[int, str, float]]] = {}
        for row, place, name, outcome in self._outcomes():
            ratio = outcome.time_us / row.outcomes[place][self.own].time_us
            if ratio < 1 - _NOISE:
                found.setdefault(name, []).append((row.case.nbytes, place, ratio))
        return found

    def average_busbw(self) -> float:
        """Return the mean of mpicomm's bus bandwidths, as nccl-tests does."""
        found = [row.case.busbw_gb_s(outcome.time_us) for row, _, name, outcome in self._outcomes() if name == self.own]
        return sum(found) / len(found)

    def footer(self) -> list[str]:
        """Return the lines below the table."""
        lines = [f"Avg bus bandwidth    : {self.average_busbw():.3f}"]
        slower = self.slower()
        for name, places in self.geometric_means().items():
            means = ", ".join(f"{place} {mean:.3f} ({count} sizes)" for place, (mean, count) in places.items())
            lines.append(f"{name} / {self.own}, geometric mean: {means}")
            if name in slower:
                _, place, ratio = worst = min(slower[name], key=lambda entry: entry[2])
                lines.append(f"  faster at {len(slower[name])} of them, most at {worst[0]} B {place}: {ratio:.2f}")
        eager = {outcome.eager: name for _, _, name, outcome in self._outcomes() if outcome.eager}
        lines += [f"* {name} is timed call by call: {reason}" for reason, name in eager.items()]
        silent = {
            (name, reason): None
            for row in self.rows
            for reasons in row.silent.values()
            for name, reason in reasons.items()
        }
        lines += [f"- {name}: {reason}" for name, reason in silent]
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
                    place: {name: _record(row.case, outcome) for name, outcome in found.items()}
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


def _record(case: Case, outcome: Outcome) -> dict[str, Any]:
    bandwidths = {"algbw_gb_s": case.algbw_gb_s(outcome.time_us), "busbw_gb_s": case.busbw_gb_s(outcome.time_us)}
    return {**asdict(outcome), **bandwidths}
