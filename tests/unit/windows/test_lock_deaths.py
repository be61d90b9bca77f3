"""A rank dies while it holds the lock of a window, or waits for it: the others learn its name in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.lock_death_jobs import require_named
from tests.helpers.jobs.pace import stretched
from tests.helpers.programs.lock_deaths import WAYS


@pytest.mark.parametrize("how", WAYS)
def test_survivors_name_the_rank_that_died(tmp_path: Path, how: str) -> None:
    require_named(tmp_path, 3, "cpu", how, stretched(1.0))
