"""Run jobs of lock_deaths.py from one process, and check the calls of the ranks that survive."""

from __future__ import annotations

import json
from pathlib import Path

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.lock_deaths import Call

SLACK_S = 1.0  # a call may exceed its deadline by so much


def require_named(results: Path, ranks: int, device: str, how: str, timeout_s: float) -> None:
    """Assert that survivors go on at other locks, and get an error in time that names the last rank."""
    victim = ranks - 1
    job = run_job(ranks, "-m", "tests.helpers.programs.lock_deaths", str(results), device, how, str(timeout_s))
    assert (results / "done").exists(), job.stdout + job.stderr
    words = "has its turn to take the lock first" if how == "waiting" else "holds the lock"
    for rank in range(victim):
        calls = [Call(*json.loads(line)) for line in (results / f"rank-{rank}").read_text().splitlines()]
        if how == "waiting" and rank > 0:
            assert all(not call.error for call in calls), f"rank {rank}: {calls}"
            continue
        *others, last = calls
        assert all(not call.error for call in others), f"rank {rank}: {others}"
        assert (last.name, last.error) == ("lock", "CollectiveTimeoutError"), f"rank {rank}: {last}"
        assert last.ranks == [victim], f"rank {rank}: {last}"
        assert f"Win.Lock: rank {victim} {words}" in last.text, last
        assert last.seconds < timeout_s + stretched(SLACK_S), last
