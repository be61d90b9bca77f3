"""Runs all checks, and reports their faults to people and in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpicomm.doctor import gpu_checks, mpi_checks
from mpicomm.doctor.check import Check, Job

CHECKS: tuple[Check, ...] = (*mpi_checks.CHECKS, *gpu_checks.CHECKS)


Results = Sequence[tuple[Check, list[str] | None]]
"""Each check with the faults that it has found; None if there was nothing to check."""


def examine(job: Job, checks: Sequence[Check] = CHECKS) -> Results:
    """Make checks of a job."""
    return [(check, check.find(job)) for check in checks]


def lines(results: Results) -> list[str]:
    """Return the lines for people."""
    shown = []
    for check, faults in results:
        if faults:
            shown += [*(f"FAULT {check.name}: {fault}" for fault in faults), f"      fix: {check.fix}"]
        elif faults is None:
            shown.append(f"skip  {check.name}: {check.nothing}")
        else:
            shown.append(f"ok    {check.name}: {check.title}")
    return shown


def record(job: Job, results: Results) -> dict[str, Any]:
    """Return the JSON object."""
    return {
        "checks": [
            {"name": check.name, "faults": faults or [], "fix": check.fix, "skipped": faults is None}
            for check, faults in results
        ],
        "ranks": [dataclasses.asdict(one) for one in job],
    }
