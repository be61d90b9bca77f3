"""A rank dies while it holds the lock of a window on GPUs, or waits for it: the other rank learns its name in time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mpicomm.devices.cuda.driver import visible_devices
from mpicomm.errors import BackendUnavailableError
from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.lock_deaths import WAYS, Call

SLACK_S = 1.0  # a call may exceed its deadline by so much

try:
    visible_devices()
except BackendUnavailableError as unavailable:
    pytest.skip(f"no GPU to test on: {unavailable}", allow_module_level=True)


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
