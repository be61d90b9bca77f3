"""A rank dies in a product that overlaps with its collective, or at the lock of a window: the other learns its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.mpiexec import run_job
from tests.helpers.jobs.survivors import calls_of
from tests.helpers.programs.deaths import DEATHS, PROGRAM, WAYS, require_named

TIMEOUT_S = 2.0


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivor_of_a_product_names_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 2, "cuda", kind, how, TIMEOUT_S)
    assert int((tmp_path / "products-0").read_text()) > 1, "the call does not overlap"


@pytest.mark.parametrize("how", WAYS)
def test_survivor_goes_on_at_other_locks_and_names_the_rank_that_died(tmp_path: Path, how: str) -> None:
    job = run_job(2, *PROGRAM, str(tmp_path), "lock", how, str(TIMEOUT_S))
    assert (tmp_path / "done").exists(), job.stdout + job.stderr
    words = "has its turn to take the lock first" if how == "waiting" else "holds the lock"
    *others, last = calls_of(tmp_path, 0)
    assert not any(call.errors for call in others), others
    last.require_missing(TIMEOUT_S, 1, f"Win.Lock: rank 1 {words}")
