"""A rank dies in a product that overlaps with its collective: the other rank learns its name in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicomm.devices.cuda.driver import visible_devices
from mpicomm.errors import BackendUnavailableError
from tests.helpers.jobs.product_death_jobs import DEATHS, survivors

try:
    visible_devices()
except BackendUnavailableError as unavailable:
    pytest.skip(f"no GPU to test on: {unavailable}", allow_module_level=True)


@pytest.mark.parametrize(("kind", "how"), DEATHS)
def test_survivor_names_the_rank_that_died(tmp_path: Path, kind: str, how: str) -> None:
    for call in survivors(tmp_path, 2, "cuda", kind, how, 2.0):
        assert call.products > 1, "the call does not overlap"
