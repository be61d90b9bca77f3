"""Runs all checks and says what they found, to people, in JSON, and in README's table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mpicomm.doctor import gpu_checks, mpi_checks
from mpicomm.doctor.check import Check, Job

CHECKS: tuple[Check, ...] = (*mpi_checks.CHECKS, *gpu_checks.CHECKS)

_HANG = (
    "it hangs",
    "`python -m mpicomm.doctor --pid PID`, beside the job, with the pid of a rank or of mpirun: it names the rank for "
    "which the others wait, and its call; `--job` shows all jobs of the user",
)
"""The first row of README's table, which no check finds, because it is in the program."""


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


def readme_table() -> str:
    """Return README's table of troubles: `_HANG`, and a row for each check."""
    rows = [_HANG, *((check.symptom, check.fix) for check in CHECKS)]
    return "\n".join(["| symptom | fix |", "|---|---|", *(f"| {symptom} | {fix} |" for symptom, fix in rows)])
