from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.faults.leaks import collect_only_new_objects, nothing_leaks


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    collect_only_new_objects()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield
