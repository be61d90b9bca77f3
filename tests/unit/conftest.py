from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from mpicomm.devices.host import HostBackend
from mpicomm.log import logger
from tests.helpers.fakes.fake_cuda import FakeCuda, imported_over

# The load of the machine decides how long an example takes, and how long drawing it takes.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture
def backend(no_leaks: None) -> HostBackend:
    return HostBackend(60.0)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of messages of strangers in the log lines of exchanges."""
    counts: list[int] = []
    monkeypatch.setattr(logger, "warning", lambda text, count: counts.append(count))
    return counts


@pytest.fixture
def cuda(request: pytest.FixtureRequest) -> Iterator[FakeCuda]:
    """A fake over which a test imports modules that use CUDA; the parameter is a seed."""
    fake = FakeCuda(getattr(request, "param", 0))
    with imported_over(fake):
        yield fake
