"""A rank dies in a product that overlaps with its collective: the other rank learns its name in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.jobs.product_death_jobs import DEATHS, require_named


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivor_names_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    require_named(tmp_path, 2, "cuda", kind, how, 2.0)
    assert int((tmp_path / "products-0").read_text()) > 1, "the call does not overlap"
