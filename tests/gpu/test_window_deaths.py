"""A rank dies while it holds the lock of a window on GPUs, or waits for it: the other rank learns its name in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.survivors import calls_of
from tests.helpers.programs.lock_deaths import WAYS


@pytest.mark.parametrize("how", WAYS)
def test_survivor_names_the_rank_that_died(tmp_path: Path, how: str) -> None:
    require_named(tmp_path, 2, how, 2.0)


def require_named(results: Path, ranks: int, how: str, timeout_s: float) -> None:
    """Assert that survivors go on at other locks, and get an error in time that names the last rank."""
    victim = ranks - 1
    job = run_job(ranks, "-m", "tests.helpers.programs.lock_deaths", str(results), how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    words = "has its turn to take the lock first" if how == "waiting" else "holds the lock"
    for rank in range(victim):
        calls = calls_of(results, rank)
        last = None if how == "waiting" and rank > 0 else calls.pop()
        assert not any(call.errors for call in calls), f"rank {rank}: {calls}"
        if last is not None:
            last.require_missing(timeout_s, victim, f"Win.Lock: rank {victim} {words}")
