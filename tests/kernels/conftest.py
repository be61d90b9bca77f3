from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests.kernels.build import Builds, cache, missing

MISSING = [name for name in ("ml_dtypes", "cuda") if find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []  # the arguments of kernels are made by modules that need both


def pytest_report_header() -> str:
    return f"tests/kernels is left out, without {' and '.join(MISSING)}" if MISSING else "tests/kernels: all is there"


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    yield from _builds(tmp_path_factory, sanitize=False)


@pytest.fixture(scope="session")
def watched_builds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builds]:
    """Builds for ThreadSanitizer."""
    yield from _builds(tmp_path_factory, sanitize=True)


def _builds(tmp_path_factory: pytest.TempPathFactory, *, sanitize: bool) -> Iterator[Builds]:
    if why := missing():
        pytest.skip(f"{why}: kernels cannot run on the processor")
    directory = cache()
    if directory is None:
        directory = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:  # workers share their builds
            directory = directory.parent
    builds = Builds(directory, sanitize=sanitize)
    yield builds
    builds.end()
