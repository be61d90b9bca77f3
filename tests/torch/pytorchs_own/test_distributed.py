"""PyTorch's own tests of ``torch.distributed`` with the backend ``mpicomm``.

They need 3 ranks, because they make groups of the ranks 1 and 2; some run on exactly 4. On GPUs, which the ranks may
share, tests with tensors of GPUs run, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from mpi4py import MPI
from torch.testing._internal import common_utils

import mpicomm.torch  # noqa: F401 - it registers the backend
from tests.torch.pytorchs_own.imported import (
    ALL,
    BACKEND,
    RUNNABLE,
    SKIPPED,
    DistributedTests,
    name_method,
    shared_gpus,
)

pytestmark = [
    pytest.mark.mpi(min_size=3),
    pytest.mark.filterwarnings("default"),  # PyTorch's tests call names that it deprecates
]

_TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[MPI.Intracomm]:
    """The ranks, with the group of all of them, and with the folder and the variables that the tests use."""
    ranks = MPI.COMM_WORLD.Dup()
    folder = Path(os.environ["TEST_RESULTS"], request.node.callspec.id)
    for name in ("test_dir", "barrier"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for variable, value in {"TEMP_DIR": folder, "WORLD_SIZE": ranks.size, "BACKEND": BACKEND}.items():
        monkeypatch.setenv(variable, str(value))
    # PyTorch gives groups half an hour if a test names no time.
    monkeypatch.setattr(dist.distributed_c10d, "default_pg_timeout", _TIMEOUT)
    name_method(f"file://{folder}/again")
    dist.init_process_group(
        BACKEND, init_method=f"file://{folder}/first", rank=ranks.rank, world_size=ranks.size, timeout=_TIMEOUT
    )
    yield ranks
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.Free()


@pytest.mark.parametrize("name", [name for name in RUNNABLE if name not in SKIPPED])
def test_of_pytorch(name: str, ranks: MPI.Intracomm) -> None:
    """Tests that PyTorch keeps for other backends, or for GPUs, are not among them."""
    common_utils.set_rng_seed()
    tests = DistributedTests(name, ranks)
    with shared_gpus():
        getattr(tests, name)()
    tests._barrier()
    tests.doCleanups()


def test_few_tests_are_skipped() -> None:
    assert SKIPPED.keys() <= set(ALL)
    assert len(SKIPPED) <= 0.15 * len(RUNNABLE)
