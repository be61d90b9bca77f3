from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from mpi4py import MPI

import mpicomm

# A rank loads it when it has waited for long. Hypothesis also draws constants of the modules that are loaded, so a rank
# that had loaded it alone would draw other calls than the other ranks.
import mpicomm.activity.reading
from mpicomm.devices.cuda.driver import visible_devices
from tests.helpers.inputs.communicator_calls import require_works
from tests.helpers.jobs.agreement import agree, pace, parametrize_devices, require_device  # noqa: F401 - a fixture
from tests.helpers.rigs.communicators import array_module, communicator
from tests.helpers.rigs.message_rigs import Rig, rig_on


# Last, because it replaces the terminal reporter that pytest sets up in the same hook.
@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    agree(config)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        parametrize_devices(metafunc, _has_gpu)


def _has_gpu() -> bool:
    try:
        return bool(visible_devices())
    except mpicomm.BackendUnavailableError:
        return False


@pytest.fixture
def comm_world() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    if require_device(request) == "cuda":
        # A CUDA context lasts as long as its process: made here, it is no leak of the first test that needs it.
        with communicator(request.param) as comm:
            comm.zeros(1, "u1")
    return str(request.param)


@pytest.fixture(scope="module")
def comm(device: str) -> Iterator[mpicomm.Communicator]:
    """One for all tests of a file, which takes less time than one each: no call may depend on those before it."""
    with shared_by_tests(device) as shared:
        yield shared


@pytest.fixture(scope="module")
def host_comm() -> Iterator[mpicomm.Communicator]:
    """As `comm`, for tests of only the host."""
    with shared_by_tests("cpu") as shared:
        yield shared


@contextmanager
def shared_by_tests(device: str) -> Iterator[mpicomm.Communicator]:
    with communicator(device) as shared:
        yield shared
        with array_module(shared) as xp:
            require_works(shared, xp)
        assert not shared.Iprobe()  # a message that a test has left would reach a receive of another one


@pytest.fixture
def own_comm(device: str) -> Iterator[mpicomm.Communicator]:
    """A communicator for a test that breaks it, or measures its resources."""
    with communicator(device) as own:
        yield own


@pytest.fixture(scope="module")
def parent() -> Iterator[mpicomm.Communicator]:
    """A communicator on the host; `rig` takes its duplicates for communicators on GPUs."""
    if MPI.COMM_WORLD.size == 1:
        pytest.skip("a rank that sends to itself before it receives waits for ever in some MPIs")
    with communicator("cpu") as comm:
        yield comm


@pytest.fixture
def rig(parent: mpicomm.Communicator) -> Iterator[Rig]:
    """A communicator whose device is made of threads, for messages."""
    with rig_on(parent) as rig:
        yield rig


@pytest.fixture
def xp(comm: mpicomm.Communicator) -> Iterator[Any]:
    """NumPy or CuPy, for the device of ``comm``."""
    with array_module(comm) as module:
        yield module
