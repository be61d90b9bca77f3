from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.jobs.hosts import Hosts, hosts, why_not


@pytest.fixture(scope="session", autouse=True)
def hosts_are_possible() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two_hosts(tmp_path: Path) -> Iterator[Hosts]:
    directory = tmp_path / "hosts"
    directory.mkdir()
    with hosts(directory, 2) as made:
        yield made
