from __future__ import annotations

import os

import pytest

from tests.kernels.build import Builds, cache, missing


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return _builds(tmp_path_factory, sanitize=False)


@pytest.fixture(scope="session")
def watched_builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Builds for ThreadSanitizer."""
    return _builds(tmp_path_factory, sanitize=True)


def _builds(tmp_path_factory: pytest.TempPathFactory, *, sanitize: bool) -> Builds:
    if why := missing():
        pytest.skip(f"{why}: kernels cannot run on the processor")
    directory = cache()
    if directory is None:
        directory = tmp_path_factory.getbasetemp()
        if "PYTEST_XDIST_WORKER" in os.environ:  # workers share their builds
            directory = directory.parent
    return Builds(directory, sanitize=sanitize)
