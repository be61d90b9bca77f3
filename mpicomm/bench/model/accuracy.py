"""The error of predictions against measured runs over several nodes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean

from mpicomm.errors import InvalidUsageError


@dataclass(frozen=True)
class Run:
    """A measured run of the collective over ``nodes`` nodes. ``nbytes`` is the largest buffer of a rank."""

    nodes: int
    nbytes: int
    time_us: float


@dataclass(frozen=True)
class Compared:
    """A run and the model's prediction for it."""

    run: Run
    predicted_us: float

    @property
    def ratio(self) -> float:
        """The predicted time divided by the measured time."""
        return self.predicted_us / self.run.time_us


def read_runs(path: Path) -> list[Run]:
    """Read a JSON list of runs. Raises `InvalidUsageError` for any other file."""
    try:
        found = [
            Run(int(run["nodes"]), int(run["nbytes"]), float(run["time_us"])) for run in json.loads(path.read_text())
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidUsageError(f"--against {path} cannot be read ({error!r}): {_WAY_OUT}") from None
    if not found or any(run.nodes < 1 or run.nbytes < 1 or run.time_us <= 0 for run in found):
        raise InvalidUsageError(f"--against {path} has no runs, or one with a number that is not above 0: {_WAY_OUT}")
    return found


_WAY_OUT = 'give a JSON list of runs, as in [{"nodes": 2, "nbytes": 1024, "time_us": 40.5}]'


def compare(runs: Sequence[Run], predict_us: Callable[[int, int], float]) -> list[Compared]:
    """Return each run with its prediction. ``predict_us`` takes the number of nodes and the size."""
    return [Compared(run, predict_us(run.nodes, run.nbytes)) for run in runs]


def error_of(compared: Sequence[Compared]) -> str:
    """Return the error: the geometric mean of predicted / measured, the mean factor between the two, and the range."""
    ratios = [each.ratio for each in compared]
    mean = geometric_mean(ratios)
    factor = geometric_mean(max(ratio, 1 / ratio) for ratio in ratios)
    return (
        f"predicted / measured of {len(ratios)} runs: geometric mean {mean:.2f}, from {min(ratios):.2f} to "
        f"{max(ratios):.2f}; a prediction is off by a factor of {factor:.2f} in the mean"
    )
