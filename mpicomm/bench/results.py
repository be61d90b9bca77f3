"""The results of a run: the mean of each ratio, the lines below the table, and the JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import geometric_mean
from typing import Any

from mpicomm.bench.measure import Outcome
from mpicomm.bench.operations import ROOT, Case

_NOISE = 0.03  # two runs on the same machine differ by as much


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
    return {
        "time_us": outcome.time_us,
        "issue_us": outcome.issue_us,
        "algbw_gb_s": case.algbw_gb_s(outcome.time_us),
        "busbw_gb_s": case.busbw_gb_s(outcome.time_us),
        "wrong": outcome.wrong,
        "eager": outcome.eager,
        "way": outcome.way,
    }
