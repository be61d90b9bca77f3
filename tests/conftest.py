from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.helpers.faults.leaks import collect_only_new_objects, nothing_leaks
from tests.helpers.jobs.pace import set_pace
from tests.helpers.jobs.sweeps import draw_few_examples, mark_sweeps


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_sweeps(items)
    if config.option.markexpr == "not sweep":
        draw_few_examples(items)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("needs_root") and os.geteuid() != 0:
        pytest.skip("needs root")


@pytest.fixture(scope="module", autouse=True)
def quick_garbage_collection() -> None:
    collect_only_new_objects()


@pytest.fixture(scope="module", autouse=True)
def pace() -> None:
    set_pace(None)


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield
