from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.helpers.leaks import nothing_leaks


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    # Who looks for leaks collects garbage, again and again. What is there before the tests of a file stays: to look at
    # all of it each time takes longer than most of these tests.
    gc.collect()
    gc.freeze()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield
