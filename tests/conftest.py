from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.leaks import collect_new_objects_alone, nothing_leaks


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    collect_new_objects_alone()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield
