from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.leaks import nothing_leaks


@pytest.fixture
def no_leaks() -> Iterator[None]:
    with nothing_leaks():
        yield
