from __future__ import annotations

import pytest

from tests.kernels.build import Builds, missing


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    return _builds(tmp_path_factory, sanitize=False)


@pytest.fixture(scope="session")
def watched_builds(tmp_path_factory: pytest.TempPathFactory) -> Builds:
    """Builds for ThreadSanitizer."""
    return _builds(tmp_path_factory, sanitize=True)


def _builds(tmp_path_factory: pytest.TempPathFactory, *, sanitize: bool) -> Builds:
    if why := missing():
        pytest.skip(f"kernels cannot run on the processor: {why}")
    return Builds(tmp_path_factory.mktemp("builds"), sanitize=sanitize)
