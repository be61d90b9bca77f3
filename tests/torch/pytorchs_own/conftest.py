from __future__ import annotations

import pytest

from tests.helpers.jobs.agreement import agree


# Last, because it replaces the terminal reporter that pytest sets up in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    agree(config)
    # PyTorch's file calls these names when it is imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*deprecated:DeprecationWarning")
