"""Ranks that do not come, and groups that end under a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import mpicomm
import mpicomm.torch
from mpicomm import CollectiveTimeoutError, MpicommError
from tests.helpers.jobs.pace import HANG_S, stretched

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_alone]

REFUSED_BY_OLD_PYTORCH = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 14), reason="this PyTorch refuses all backends but gloo"
)


@REFUSED_BY_OLD_PYTORCH
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing_and_leaves_the_group_usable(
    world: dist.ProcessGroup, wait_all_ranks: bool
) -> None:
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=stretched(1))
    dist.monitored_barrier(group, wait_all_ranks=wait_all_ranks)
    names = ", ".join(map(str, range(1, size))) if wait_all_ranks else "1"
    comes = rank == 0 or (rank > 1 and not wait_all_ranks)
    if rank == 0:
        with pytest.raises(RuntimeError, match=f"Ranks? {names} failed to pass") as caught:
            dist.monitored_barrier(group, limit, wait_all_ranks=wait_all_ranks)
        assert isinstance(caught.value, mpicomm.CollectiveTimeoutError)
        assert ", ".join(map(str, caught.value.ranks)) == names
    if rank and comes:
        with pytest.raises(RuntimeError, match=f"Rank {rank} successfully reached .*: Ranks? {names} failed to pass"):
            dist.monitored_barrier(group, limit)
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    assert total.item() == size
    if not comes:  # late, it gets the error, too
        with pytest.raises(RuntimeError, match=f"Rank {rank} successfully reached .*: Ranks? {names} failed to pass"):
            dist.monitored_barrier(group, limit)
    dist.monitored_barrier(group, timedelta(seconds=HANG_S))
    kept = group.get_group_store().num_keys()
    for _ in range(5):
        dist.monitored_barrier(group, timedelta(seconds=HANG_S))
        dist.barrier(group)
    assert rank or group.get_group_store().num_keys() <= kept + 1  # rank 0 deletes them
    dist.destroy_process_group(group)


@REFUSED_BY_OLD_PYTORCH
def test_rank_0_that_comes_late_to_a_monitored_barrier_raises_as_the_others_did(world: dist.ProcessGroup) -> None:
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.barrier()
    with pytest.raises(RuntimeError, match=r"rank 0 did not come within 0\.4 s"):
        dist.monitored_barrier(group, timedelta(seconds=0.2))
    if dist.get_rank() != 0:
        dist.barrier()
    dist.monitored_barrier(group, timedelta(seconds=HANG_S))
    dist.destroy_process_group(group)


def test_a_group_may_be_destroyed_while_a_rank_waits_in_a_call(world: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=stretched(2.0)))
    start = time.monotonic()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError):
            work.wait()
    else:
        dist.destroy_process_group(group)
    assert time.monotonic() - start < stretched(8.0)
    dist.barrier()


TIMEOUT_S = 1.0
SLACK_S = 1.0
CALLS: dict[str, Callable[[dist.ProcessGroup], object]] = {
    "all_reduce_of_many": lambda group: dist.all_reduce(torch.ones(500_000), group=group),
    "broadcast": lambda group: dist.broadcast(torch.ones(4), group_src=dist.get_world_size() - 1, group=group),
    "all_to_all_single": lambda group: dist.all_to_all_single(
        torch.ones(dist.get_world_size()), torch.ones(dist.get_world_size()), group=group
    ),
    "barrier": lambda group: dist.barrier(group),
    "wait": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(),
    "future": lambda group: dist.all_reduce(torch.ones(4), group=group, async_op=True).get_future().wait(),
    "all_gather_object": lambda group: dist.all_gather_object([None] * dist.get_world_size(), "x", group=group),
}


@pytest.fixture
def group(world: dist.ProcessGroup) -> Iterator[dist.ProcessGroup]:
    """A group whose calls end early. All ranks destroy it together, also after a test that fails on one of them."""
    made = impatient()
    yield made
    MPI.COMM_WORLD.Barrier()
    dist.destroy_process_group(made)
    dist.barrier()


def impatient() -> dist.ProcessGroup:
    return dist.new_group(timeout=timedelta(seconds=stretched(TIMEOUT_S)))


@pytest.mark.parametrize("name", CALLS)
def test_a_rank_that_never_calls_is_named_in_time(group: dist.ProcessGroup, name: str) -> None:
    culprit = dist.get_world_size() - 1
    if dist.get_rank() != culprit:
        start = time.monotonic()
        # A future passes on only the text of an error.
        expected = RuntimeError if name == "future" else CollectiveTimeoutError
        with pytest.raises(
            expected, match=f"rank {culprit} did not arrive within {stretched(TIMEOUT_S):g} s"
        ) as raised:
            CALLS[name](group)
        assert time.monotonic() - start < stretched(TIMEOUT_S + SLACK_S)
        if name != "future":
            assert isinstance(raised.value, CollectiveTimeoutError)
            assert raised.value.ranks == (culprit,)
        with pytest.raises(CollectiveTimeoutError, match=f"unusable since an earlier .*rank {culprit} did not arrive"):
            dist.all_reduce(torch.ones(4), group=group)


def test_a_rank_that_does_not_make_a_group_is_named(world: dist.ProcessGroup) -> None:
    culprit = dist.get_world_size() - 1
    if dist.get_rank() == culprit:
        time.sleep(stretched(TIMEOUT_S + SLACK_S))
    with pytest.raises(RuntimeError, match=f"Rank {culprit} failed to pass new_group in {stretched(TIMEOUT_S):g} s"):
        impatient()
    dist.destroy_process_group(dist.new_group())


@pytest.mark.parametrize("hook", [None, mpicomm.torch.allreduce_hook])
def test_a_step_of_data_parallel_training_raises(group: dist.ProcessGroup, hook: Any) -> None:
    culprit = dist.get_world_size() - 1
    model = DistributedDataParallel(nn.Linear(5, 5), process_group=group)
    if hook:
        model.register_comm_hook(group, hook)
    if dist.get_rank() != culprit:
        with pytest.raises(RuntimeError, match=f"rank {culprit} did not arrive within {stretched(TIMEOUT_S):g} s"):
            model(torch.ones(2, 5)).sum().backward()


def test_a_message_that_never_comes_times_out(group: dist.ProcessGroup) -> None:
    start = time.monotonic()
    text = f"recv from rank 1 has not ended within {stretched(TIMEOUT_S):g} s"
    try:
        if dist.get_rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match=text):
                dist.recv(torch.ones(4), group_src=1, group=group)
            assert time.monotonic() - start < stretched(TIMEOUT_S + SLACK_S)
    finally:
        MPI.COMM_WORLD.Barrier()
    if dist.get_rank() == 1:
        dist.send(torch.ones(4), group_dst=0, group=group)


def test_a_rank_that_does_not_destroy_the_group_keeps_no_other(
    world: dist.ProcessGroup, caplog: pytest.LogCaptureFixture
) -> None:
    group = impatient()
    dist.all_reduce(torch.ones(4), group=group)
    try:
        if dist.get_rank():
            start = time.monotonic()
            dist.destroy_process_group(group)
            assert time.monotonic() - start < stretched(TIMEOUT_S + SLACK_S)
    finally:
        MPI.COMM_WORLD.Barrier()
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)
    assert "a process group is not freed on all ranks" in caplog.text
    dist.barrier()


def test_ranks_that_call_different_things_learn_it(group: dist.ProcessGroup) -> None:
    with pytest.raises(MpicommError, match=r"Allreduce.*Bcast|Bcast.*Allreduce|did not arrive within"):
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(70_000), group=group)
        else:
            dist.broadcast(torch.ones(70_000), 0, group=group)
