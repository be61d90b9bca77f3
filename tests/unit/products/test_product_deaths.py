"""A rank dies in the product of a call: the others learn its name in time, and do not wait for it in MPI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.pace import stretched
from tests.helpers.jobs.product_death_jobs import DEATHS, require_named


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivors_name_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 3, "cpu", kind, how, stretched(1.0))
