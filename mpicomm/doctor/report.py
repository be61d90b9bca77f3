"""Runs all checks, and reports their faults to people and in JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpicomm.doctor import gpu_checks, mpi_checks
from mpicomm.doctor.check import Check, Job

CHECKS: tuple[Check, ...] = (*mpi_checks.CHECKS, *gpu_checks.CHECKS)


def examine(job: Job, checks: Sequence[Check] = CHECKS) -> list[tuple[Check, list[str]]]:
    """Return each check with the faults that it finds."""
    return [(check, check.find(job)) for check in checks]


def lines(results: Sequence[tuple[Check, list[str]]]) -> list[str]:
    """Return the lines for people."""
    shown = []
    for check, faults in results:
        shown += [f"FAULT {check.name}: {fault}" for fault in faults]
        shown.append(f"      fix: {check.fix}" if faults else f"ok    {check.name}: {check.title}")
    return shown


def record(job: Job, results: Sequence[tuple[Check, list[str]]]) -> dict[str, Any]:
    """Return the JSON object."""
    return {
        "checks": [{"name": check.name, "faults": faults, "fix": check.fix} for check, faults in results],
        "ranks": [dataclasses.asdict(one) for one in job],
    }
