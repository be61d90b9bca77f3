"""Ranks die, stop or fail at hundreds of random lines: survivors get an error in time, leak nothing, and go on."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.jobs.pace import stretched
from tests.helpers.jobs.peer_death_jobs import run_jobs
from tests.helpers.programs.peer_death import FOR_GOOD

RANKS, TRIALS, KILLS = 3, 64, 2


def test_survivors_of_any_death_learn_it_in_time_and_go_on(tmp_path: Path) -> None:
    seen = run_jobs(tmp_path, 1, RANKS, TRIALS, KILLS, timeout_s=stretched(0.5))
    wrong = [(rank, outcome) for job in seen for rank, each in enumerate(job) for outcome in each if outcome.wrong]
    assert not wrong, "\n".join(f"rank {rank}: {outcome}" for rank, outcome in wrong)
    for job in seen:
        dead: set[int] = set()
        for trial in range(TRIALS + KILLS):
            told = {rank: outcome for rank, each in enumerate(job) for outcome in each if outcome.trial == trial}
            how, victim = next((outcome.how, outcome.victim) for outcome in told.values())
            dead |= {victim} if how in FOR_GOOD else set()
            assert set(told) == set(range(RANKS)) - dead, f"trial {trial}: {told}"
    # A victim may have done its part for the others already; if most victims had, this would test nothing.
    survivors = [outcome for job in seen for rank, each in enumerate(job) for outcome in each if outcome.victim != rank]
    assert sum(bool(outcome.error) for outcome in survivors) > 0.7 * len(survivors)
