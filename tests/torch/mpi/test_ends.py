"""Ranks that do not come, and groups that end under a call."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import mpicomm
from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same, while_the_last_rank_is_late
from tests.helpers.jobs.pace import stretched

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_alone]


def _is_last(group: dist.ProcessGroup) -> bool:
    return bool(dist.get_rank(group) == dist.get_world_size(group) - 1)


def test_a_rank_that_does_not_come_makes_a_runtime_error(world: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    if not _is_last(group):
        with pytest.raises(RuntimeError, match="barrier: the timeout is over") as caught:
            dist.barrier(group)
        assert isinstance(caught.value, mpicomm.CollectiveTimeoutError)
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        with pytest.raises(RuntimeError):
            work.wait()
    dist.barrier()
    dist.destroy_process_group(group)


REFUSED_BY_OLD_PYTORCH = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12), reason="this PyTorch refuses all backends but gloo"
)


@REFUSED_BY_OLD_PYTORCH
@pytest.mark.parametrize("wait_all_ranks", [False, True])
def test_a_monitored_barrier_names_who_is_missing_and_leaves_the_group_usable(
    world: dist.ProcessGroup, wait_all_ranks: bool
) -> None:
    group = dist.new_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    limit = timedelta(seconds=1)
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
    dist.monitored_barrier(group, timedelta(seconds=10))
    kept = group.get_group_store().num_keys()
    for _ in range(5):
        dist.monitored_barrier(group, timedelta(seconds=10))
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
    dist.monitored_barrier(group, timedelta(seconds=10))
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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_callback_may_destroy_the_group(world: dist.ProcessGroup, is_late: bool) -> None:
    """The last rank adds the callback to a complete future. If it is late, the futures of the others are incomplete."""
    group = dist.new_group()
    case = Case(group)
    tensors = [case.own(3, salt=salt) for salt in range(3)]

    def destroy(_: object) -> None:
        dist.destroy_process_group(group)

    def reduce(_: object) -> None:
        dist.all_reduce(tensors[2], group=group)

    with while_the_last_rank_is_late() as on_time:
        works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:2]]
        if on_time or not is_late:
            ended = [works[1].get_future().then(reduce), works[0].get_future().then(destroy)]
    if is_late and not on_time:
        for work in works:
            work.wait()
        ended = [works[1].get_future().then(reduce), works[0].get_future().then(destroy)]
    torch.futures.wait_all(ended)
    for work in works:
        work.wait(timedelta(seconds=5))
    require_same(tensors, [reduced(case.all(3, salt=salt), Op.SUM) for salt in range(3)])
    with pytest.raises(mpicomm.InvalidUsageError, match="was destroyed"):
        group.barrier()
    dist.barrier()
