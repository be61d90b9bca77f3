"""init_process_group with all sources of rank and size: only MPI, the environment, a store; and its end."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh

from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.torch import communicator
from tests.helpers.faults.leaks import nothing_leaks
from tests.helpers.faults.raising import raises_everywhere
from tests.helpers.jobs.pace import HANG_S, stretched

pytestmark = pytest.mark.host_alone

WORLD = MPI.COMM_WORLD
LIMIT = timedelta(seconds=HANG_S)
OTHER_ORDER = [*range(1, WORLD.size), 0]
"""The rank in PyTorch of each rank of MPI."""


@pytest.fixture(autouse=True)
def no_group() -> Iterator[None]:
    yield
    left = dist.is_initialized()
    if left:
        dist.destroy_process_group()
    assert not left


@pytest.fixture
def shared_path(tmp_path: Path) -> Path:
    """A file that no rank has made yet."""
    path: Path = WORLD.bcast(tmp_path / "store")
    return path


def require_works(rank: int = WORLD.rank) -> None:
    """Assert that the group of all ranks works and has this rank, and destroy it."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, WORLD.size)
    assert dist.get_backend() == "mpicomm"
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(WORLD.size)]
    dist.all_gather(gathered, torch.tensor([rank]))
    assert [int(each) for each in gathered] == list(range(WORLD.size))
    dist.destroy_process_group()


def served() -> dist.TCPStore:
    """Return a store on rank 0, which listens on a port that the system has chosen. Collective."""
    if WORLD.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, WORLD.size, True, LIMIT, wait_for_workers=False, multi_tenant=True)
        WORLD.bcast(store.port)
        return store
    return dist.TCPStore("127.0.0.1", WORLD.bcast(None), WORLD.size, False, LIMIT)


# mpicomm takes the tensors of the host in both.
@pytest.mark.parametrize("backend", ["cpu:mpicomm,cuda:mpicomm", "cpu:gloo,cuda:mpicomm"])
def test_device_types_before_the_names(backend: str) -> None:
    dist.init_process_group(backend)
    gathered = torch.ones(1)
    dist.all_reduce(gathered)
    assert float(gathered) == WORLD.size
    dist.destroy_process_group()


@pytest.mark.parametrize("source", ["launcher", "launcher with another order", "port", "file", "tcp", "url"])
def test_sources_of_rank_and_size(shared_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    rank = OTHER_ORDER[WORLD.rank] if source in ("launcher with another order", "tcp") else WORLD.rank
    url, given = None, {"rank": rank, "world_size": WORLD.size, "timeout": LIMIT}
    if source == "file":
        given["store"] = dist.FileStore(str(shared_path), WORLD.size)
    elif source == "tcp":
        given["store"] = served()
    elif source == "url":
        url = f"file://{shared_path}"
    else:
        held = served()  # as the agent of torchrun, whose port is open before the ranks come
        settings: dict[str, Any] = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": held.port}
        if source != "port":
            settings |= {"RANK": rank, "WORLD_SIZE": WORLD.size, "TORCHELASTIC_USE_AGENT_STORE": True}
        for name, value in settings.items():
            monkeypatch.setenv(name, str(value))
        given = {"timeout": LIMIT}
    dist.init_process_group("mpicomm", url, **given)
    assert communicator().rank == rank
    require_works(rank)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("size", "text"),
    [
        (1, f"torch.distributed has 1 ranks, but MPI has {WORLD.size}: start the program with mpirun -np 1"),
        (WORLD.size, f"the ranks of MPI have the ranks .*{re.escape(str([0] * WORLD.size))}"),
    ],
)
def test_another_size_than_mpis_and_a_rank_that_all_ranks_have_are_named(size: int, text: str) -> None:
    with raises_everywhere(WORLD, InvalidUsageError, match=text):
        dist.init_process_group("mpicomm", store=dist.HashStore(), rank=0, world_size=size, timeout=LIMIT)
    dist.init_process_group("mpicomm")
    require_works()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_never_comes_to_init_is_named() -> None:
    culprit = WORLD.size - 1
    if WORLD.rank != culprit:
        start = time.monotonic()
        with pytest.raises(CollectiveTimeoutError, match=f"init_process_group.*rank {culprit} did not arrive"):
            dist.init_process_group("mpicomm", timeout=timedelta(seconds=stretched(0.5)))
        assert time.monotonic() - start < stretched(1.5)
    WORLD.Barrier()
    if WORLD.rank == culprit:
        with pytest.raises(CollectiveTimeoutError, match=f"rank {culprit} did not arrive"):
            dist.init_process_group("mpicomm", timeout=timedelta(seconds=stretched(0.5)))
    dist.init_process_group("mpicomm")
    require_works()


@pytest.mark.gpu_alone
def test_groups_can_be_split_after_a_device_id() -> None:
    torch.cuda.set_device(WORLD.rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("mpicomm", device_id=device, timeout=LIMIT)
    even, odd = (list(range(first, WORLD.size, 2)) for first in range(2))
    part = dist.split_group(split_ranks=[even, odd] if odd else [even])
    total = torch.full((3,), WORLD.rank, device=device)
    dist.all_reduce(total, group=part)
    assert total.tolist() == [sum(odd if WORLD.rank % 2 else even)] * 3
    mesh = init_device_mesh("cuda", (WORLD.size,))
    dist.all_reduce(total, dist.ReduceOp.MAX, group=mesh.get_group())
    require_works()


def test_options_are_refused() -> None:
    with raises_everywhere(WORLD, InvalidUsageError, match="pg_options=3: the backend mpicomm has no options"):
        dist.init_process_group("mpicomm", pg_options=3)
    dist.init_process_group("mpicomm")
    require_works()


def test_a_group_beside_gloo() -> None:
    dist.init_process_group("gloo", store=served(), rank=WORLD.rank, world_size=WORLD.size)
    group = dist.new_group(backend="mpicomm")
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [WORLD.size] * 3
    assert communicator(group).size == WORLD.size
    dist.destroy_process_group()


def test_many_starts_and_ends_leave_nothing() -> None:
    def cycle() -> None:
        dist.init_process_group("mpicomm")
        parts = [dist.new_group() for _ in range(2)]
        works = [dist.all_reduce(torch.ones(50_000), group=group, async_op=True) for group in (*parts, None)]
        for work in works:
            assert work is not None
            work.wait()
        dist.destroy_process_group(parts[0])
        dist.destroy_process_group()

    cycle()
    with nothing_leaks():
        for _ in range(5):
            cycle()
            gc.collect()
        WORLD.Barrier()
