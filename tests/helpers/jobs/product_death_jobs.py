"""Run a job of product_deaths.py, and check the calls of the ranks that survive."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.survivors import calls_of

DEATHS = [("allgather_matmul", "kill"), ("matmul_reduce_scatter", "exit"), ("matmul_allreduce", "kill")]


def require_named(results: Path, ranks: int, device: str, kind: str, how: str, timeout_s: float) -> None:
    """Assert that the last calls of the survivors name the last rank in time."""
    victim = ranks - 1
    job = run_job(ranks, "-m", "tests.helpers.programs.product_deaths", str(results), device, kind, how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    for rank in range(victim):
        (call,) = calls_of(results, rank)
        call.require_missing(timeout_s, victim, f"rank {victim} did not")
