from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm.torch  # noqa: F401 - it registers the backend
from tests.helpers.jobs.agreement import agree, pace, parametrize_devices, require_device  # noqa: F401 - a fixture
from tests.helpers.jobs.pace import stretched


# Last, because it replaces the terminal reporter that pytest sets up in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    agree(config)
    # The tests call functions by the names that all versions have; later ones have other names for some.
    config.addinivalue_line("filterwarnings", "ignore:`torch.distributed.*deprecated:FutureWarning")
    # Modules of PyTorch warn of themselves when they are imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*deprecated:DeprecationWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    parametrize_devices(metafunc, torch.cuda.is_available)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the test's tensors: PyTorch makes them there unless the test names a device."""
    index = "" if require_device(request) == "cpu" else f":{torch.cuda.current_device()}"
    with torch.device(f"{request.param}{index}") as device:
        yield device


@pytest.fixture
def comm_world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    """The group of all ranks, by mpicomm. Its timeout ends a test soon in which a rank fails and calls no more."""
    dist.init_process_group("mpicomm", timeout=timedelta(seconds=stretched(10.0)))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, by gloo."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=stretched(10.0)))
