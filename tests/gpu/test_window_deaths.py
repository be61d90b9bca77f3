"""A rank dies while it holds the lock of a window on GPUs, or waits for it: the other rank learns its name in time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpicomm.devices.cuda.driver import visible_devices
from mpicomm.errors import BackendUnavailableError
from tests.helpers.jobs.lock_death_jobs import require_named
from tests.helpers.programs.lock_deaths import WAYS

try:
    visible_devices()
except BackendUnavailableError as unavailable:
    pytest.skip(f"no GPU to test on: {unavailable}", allow_module_level=True)


@pytest.mark.parametrize("how", WAYS)
def test_survivor_names_the_rank_that_died(tmp_path: Path, how: str) -> None:
    require_named(tmp_path, 2, "cuda", how, 2.0)
