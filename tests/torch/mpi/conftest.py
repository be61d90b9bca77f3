from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm.torch  # noqa: F401 - it registers the backend
from tests.helpers.agreement import agree


# Last, because it replaces the terminal reporter that pytest sets up in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    agree(config)
    # The tests call functions by the names that all versions have; later ones have other names for some.
    config.addinivalue_line("filterwarnings", "ignore:`torch.distributed.*deprecated:FutureWarning")
    # Modules of PyTorch warn of themselves when they are imported.
    config.addinivalue_line("filterwarnings", "ignore:`torch.jit.*deprecated:DeprecationWarning")
    torch.set_num_threads(1)  # the ranks share the cores


@pytest.fixture
def comm_world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def world() -> Iterator[dist.ProcessGroup]:
    """The group of all ranks, by mpicomm."""
    dist.init_process_group("mpicomm", timeout=timedelta(seconds=10))
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def gloo(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group of the same ranks, by gloo."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=10))
