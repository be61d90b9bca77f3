from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm.torch  # noqa: F401 - it registers the backend
from tests.helpers.jobs.agreement import agree, common_devices, pace  # noqa: F401 - a fixture
from tests.helpers.jobs.pace import stretched


# Last, because it replaces the terminal reporter that pytest sets up in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    agree(config)
    config.addinivalue_line("markers", "host_alone: a test, or all tests of a file, that says nothing of GPUs")
    config.addinivalue_line("markers", "gpu_alone: a test that says nothing of the host")
    # The tests call functions by the names that all versions have; later ones have other names for some.
    config.addinivalue_line("filterwarnings", "ignore:`torch.distributed.*deprecated:FutureWarning")
    # Modules of PyTorch warn of themselves when they are imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*deprecated:DeprecationWarning")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    devices = common_devices(metafunc.config, torch.cuda.is_available)
    if metafunc.definition.get_closest_marker("gpu_alone"):
        devices = ["cuda"]
    elif metafunc.definition.get_closest_marker("host_alone"):
        devices = ["cpu"]
    metafunc.parametrize("device", devices, indirect=True)


@pytest.fixture(autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """The device of the test's tensors: PyTorch makes them there unless the test names a device."""
    if request.param not in common_devices(request.config, torch.cuda.is_available):
        pytest.skip("not every rank has a GPU")
    index = "" if request.param == "cpu" else f":{torch.cuda.current_device()}"
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
