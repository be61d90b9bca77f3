from __future__ import annotations

import pytest

from mpicomm.devices.host import HostBackend
from mpicomm.sharing import fd_exchange


@pytest.fixture
def backend(no_leaks: None) -> HostBackend:
    return HostBackend(60.0)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the exchanges say of strangers."""
    lines: list[str] = []
    monkeypatch.setattr(fd_exchange.logger, "warning", lines.append)
    return lines
