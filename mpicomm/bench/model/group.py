"""The measured times of one peer domain, from results that ``python -m mpicomm.bench`` has written."""

from __future__ import annotations

import bisect
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpicomm.bench.contenders import OWN
from mpicomm.errors import InvalidUsageError
from mpicomm.sizes import format_size

NCCL = "nccl"
STAND_INS = {
    "reduce_scatter": "allgather",
    "allgather": "reduce_scatter",
    "scatter": "alltoall",
    "gather": "alltoall",
}
"""The collective that the model takes for an unmeasured one, because as many bytes cross the busiest link."""


class MeasuredTimes:
    """Measured times by size. ``points`` are at least two pairs of bytes and microseconds, by ascending size."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self.sizes = [size for size, _ in points]
        self.times_us = [time_us for _, time_us in points]

    @property
    def latency_us(self) -> float:
        """The time of the smallest size."""
        return self.times_us[0]

    def at(self, nbytes: float) -> float:
        """Return the time of a call of ``nbytes``.

        Between two measured sizes it is on the straight line of log(time) by log(size). Below the smallest size it is
        the time of the smallest size, which is nearly all latency. Above the largest size it is latency + bytes /
        bandwidth, on the line through the two largest sizes.
        """
        if nbytes <= self.sizes[0]:
            return self.latency_us
        right = min(bisect.bisect_left(self.sizes, nbytes), len(self.sizes) - 1)
        (low, high), (first, last) = self.sizes[right - 1 : right + 1], self.times_us[right - 1 : right + 1]
        if nbytes > high:
            return last + max(0.0, last - first) / (high - low) * (nbytes - high)
        share = math.log(nbytes / low) / math.log(high / low)
        return first * math.exp(share * math.log(last / first))


@dataclass(frozen=True)
class DomainTimes:
    """``ranks`` ranks that map each other's memory, and the times of their collectives by the bench's names."""

    ranks: int
    own: Mapping[str, MeasuredTimes]
    """mpicomm's times."""
    nccl: Mapping[str, MeasuredTimes]
    """NCCL's times, from the runs with ``--compare nccl``."""

    def times(self, collective: str) -> MeasuredTimes:
        """Return mpicomm's times of a collective or of its stand-in. Raises `InvalidUsageError` without any times."""
        found = _find(self.own, collective)
        if found is None:
            raise InvalidUsageError(
                f"--from has no times of {collective}, only of {', '.join(self.own)}: write them with mpirun -np "
                f"{self.ranks} python -m mpicomm.bench {collective} --json FILE, and add FILE"
            )
        return found

    def nccl_times(self, collective: str) -> MeasuredTimes | None:
        """Return NCCL's times of a collective or of its stand-in, if there are any."""
        return _find(self.nccl, collective)

    def us(self, collective: str, nbytes: float) -> float:
        """Return mpicomm's time of a collective in the group. ``nbytes`` is the largest buffer of a rank."""
        return self.times(collective).at(nbytes)

    def lines(self) -> list[str]:
        """Return lines with the measured collectives, and with the stand-ins for the others."""
        measured = (
            f"{name} {format_size(times.sizes[0])} to {format_size(times.sizes[-1])}"
            for name, times in self.own.items()
        )
        taken = (
            f"{name} is taken to last as long as {stand_in}"
            for name, stand_in in STAND_INS.items()
            if name not in self.own and stand_in in self.own
        )
        return [f"measured in one peer domain of {self.ranks} ranks: {', '.join(measured)}", *taken]


def _find(table: Mapping[str, MeasuredTimes], collective: str) -> MeasuredTimes | None:
    return table.get(collective) or table.get(STAND_INS.get(collective, ""))


def read_group(files: Sequence[Path]) -> DomainTimes:
    """Read results of one peer domain.

    Raises `InvalidUsageError` for files without results, or with results that do not fit.
    """
    times: dict[str, dict[str, MeasuredTimes]] = {OWN: {}, NCCL: {}}
    sizes: dict[int, Path] = {}
    for path in files:
        document = _read(path)
        collective = document["collective"]
        if collective in times[OWN]:
            raise InvalidUsageError(f"--from {path} is a second run of {collective}: name one of them")
        for contender, found in times.items():
            points = _points(document, contender)
            if len(points) > 1:
                found[collective] = MeasuredTimes(points)
        if collective not in times[OWN]:
            raise InvalidUsageError(f"--from {path} has fewer than two sizes: measure more, as with -b 1K -e 1G")
        sizes[_ranks(path, document)] = path
    if len(sizes) > 1:
        said = ", ".join(f"{path} has {ranks} ranks" for ranks, path in sizes.items())
        raise InvalidUsageError(f"--from: {said}: name runs with as many ranks as a node has")
    return DomainTimes(next(iter(sizes)), times[OWN], times[NCCL])


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidUsageError(f"--from {path} cannot be read ({error}): {_WAY_OUT}") from None
    if not isinstance(document, dict) or not {"collective", "results", "command"} <= document.keys():
        raise InvalidUsageError(f"--from {path} is no result of the bench: {_WAY_OUT}")
    return document


_WAY_OUT = "name a file that python -m mpicomm.bench COLLECTIVE --json FILE has written"


def _ranks(path: Path, document: Mapping[str, Any]) -> int:
    """Return the number of ranks. Published results have no list of ranks, but the command that started them."""
    if "ranks" in document:
        if len({rank["node"] for rank in document["ranks"]}) > 1:
            raise InvalidUsageError(f"--from {path} was measured on several nodes: name a run of one")
        return len(document["ranks"])
    started = re.search(r"-np (\d+)", document["command"])
    if started is None:
        raise InvalidUsageError(f"--from {path} does not say how many ranks ran: {_WAY_OUT}")
    return int(started[1])


def _points(document: Mapping[str, Any], contender: str) -> list[tuple[int, float]]:
    """Return a contender's times by size, out of place if there are such times."""
    points = []
    for row in document["results"]:
        outcomes = next(iter(row["places"].values()))
        if contender in outcomes and row["nbytes"] > 0:
            points.append((row["nbytes"], outcomes[contender]["time_us"]))
    return sorted(points)
