"""Run a job of product_deaths.py, and check the calls of the ranks that survive."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.product_deaths import Call

SLACK_S = 1.0  # a call may exceed its deadline by so much
DEATHS = [("allgather_matmul", "kill"), ("matmul_reduce_scatter", "exit"), ("matmul_allreduce", "kill")]


def survivors(results: Path, ranks: int, device: str, kind: str, how: str, timeout_s: float) -> list[Call]:
    """Return the last calls of the survivors, after an assertion that they name the last rank in time."""
    victim = ranks - 1
    job = run_job(ranks, "-m", "tests.helpers.programs.product_deaths", str(results), device, kind, how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    calls = [Call(*json.loads((results / f"rank-{rank}").read_text())) for rank in range(victim)]
    for rank, call in enumerate(calls):
        assert (call.error, call.ranks) == ("CollectiveTimeoutError", [victim]), f"rank {rank}: {call}"
        assert f"rank {victim} did not" in call.text, f"rank {rank}: {call}"
        assert call.seconds < timeout_s + stretched(SLACK_S), f"rank {rank}: {call}"
    return calls
