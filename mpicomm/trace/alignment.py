"""The alignment of all ranks' times to one clock, by the readings that ranks have made of each other's clocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mpicomm.trace.files import Trace


@dataclass(frozen=True)
class Clock:
    """A clock that turns times of one rank into times of the common clock, all in nanoseconds."""

    points: tuple[tuple[float, float], ...]
    """Times of this rank, and the nanoseconds to add to them. Between two points the clock has drifted evenly."""
    uncertainty_ns: float = 0.0
    by_wall_clock: bool = False
    """Whether the rank has compared its clock with no other rank, so that its wall clock must serve."""

    def common_ns(self, time_ns: float) -> float:
        """Return the time of the common clock."""
        before, offset = self.points[0]
        if time_ns <= before:
            return time_ns + offset
        for (before, low), (after, high) in pairwise(self.points):
            if time_ns <= after:
                return time_ns + low + (high - low) * (time_ns - before) / (after - before)
        return time_ns + self.points[-1][1]


def clocks_of(traces: Sequence[Trace]) -> dict[int, Clock]:
    """Return the clock of each rank. The common clock is the clock that most ranks have compared their own with.

    A rank may have compared its clock only with another rank, and then follows that rank. If no chain of such readings
    leads to the common clock, the wall clocks of the two ranks serve.
    """
    references = Counter(reading["reference"] for trace in traces for reading in trace.clocks)
    common = min(references, key=lambda rank: (-references[rank], rank))
    by_rank = {trace.rank: trace for trace in traces}
    clocks: dict[int, Clock] = {common: Clock(((0.0, 0.0),))}
    known = -1
    while known != len(clocks):  # a rank may follow a rank that this round has found
        known = len(clocks)
        for trace in traces:
            if trace.rank not in clocks:
                readings = [each for each in trace.clocks if each["reference"] in clocks]
                if readings:
                    clocks[trace.rank] = _by_readings(readings, clocks)
    base = by_rank[common] if common in by_rank else traces[0]
    for trace in traces:
        if trace.rank not in clocks:
            offset = _wall_offset(trace.clocks[0]) - _wall_offset(base.clocks[0])
            clocks[trace.rank] = Clock(((0.0, offset),), by_wall_clock=True)
    return clocks


def _by_readings(readings: Sequence[dict[str, Any]], clocks: dict[int, Clock]) -> Clock:
    points = {}
    for reading in readings:
        then = reading["time_ns"]
        points[float(then)] = clocks[reading["reference"]].common_ns(then + reading["offset_ns"]) - then
    uncertainty = max(each["uncertainty_ns"] + clocks[each["reference"]].uncertainty_ns for each in readings)
    return Clock(tuple(sorted(points.items())), uncertainty)


def _wall_offset(reading: dict[str, Any]) -> float:
    return float(reading["wall_ns"] - reading["time_ns"])
