"""Groups of some ranks: how they begin, their calls, and their ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mpicomm
from mpicomm import InvalidUsageError
from mpicomm.torch import communicator
from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same
from tests.helpers.jobs.pace import HANG_S


def require_works(group: dist.ProcessGroup | None) -> None:
    """Assert that the ranks of ``group`` can call it."""
    if group is None or group == dist.GroupMember.NON_GROUP_MEMBER:
        return
    case = Case(group)
    tensor = case.own(5)
    dist.all_reduce(tensor, group=group)
    require_same([tensor], [reduced(case.all(5), Op.SUM)])
    gathered = [torch.empty(1, dtype=torch.int64) for _ in range(case.size)]
    dist.all_gather(gathered, torch.tensor([dist.get_rank()]), group=group)
    assert [int(each) for each in gathered] == dist.get_process_group_ranks(group)


def test_the_communicator_of_a_group_has_its_ranks(world: dist.ProcessGroup) -> None:
    assert communicator() is communicator(world)
    comm = communicator()
    assert isinstance(comm, mpicomm.Communicator)
    assert (comm.rank, comm.size) == (dist.get_rank(), dist.get_world_size())
    last = dist.new_group([dist.get_world_size() - 1])
    if dist.get_rank() == dist.get_world_size() - 1:
        assert communicator(last).size == 1
        dist.destroy_process_group(last)


@pytest.mark.host_alone
def test_a_group_of_another_backend_has_no_communicator(gloo: dist.ProcessGroup) -> None:
    with pytest.raises(InvalidUsageError, match="is no group of mpicomm"):
        communicator(gloo)


def test_a_group_of_a_group_counts_roots_in_itself(world: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    ranks = list(range(size))[size // 2 :]
    group = dist.new_group(ranks)
    if dist.get_rank() in ranks:
        case = Case(group)
        by_group, by_all = case.own(3), case.own(3)
        dist.broadcast(by_group, group_src=case.size - 1, group=group)
        dist.broadcast(by_all, ranks[-1], group=group)
        require_same([by_group, by_all], [case.of(case.size - 1, 3)] * 2)
        dist.destroy_process_group(group)


@pytest.mark.host_alone
def test_groups_in_groups_of_different_sizes_at_the_same_time(world: dist.ProcessGroup) -> None:
    groups = [dist.new_group(list(range(count))) for count in range(1, dist.get_world_size() + 1)]
    for group in reversed(groups):
        require_works(group)
    for group in groups:
        if group != dist.GroupMember.NON_GROUP_MEMBER:
            dist.destroy_process_group(group)


def test_a_mesh_of_two_dimensions(world: dist.ProcessGroup, device: torch.device) -> None:
    size = dist.get_world_size()
    shape = (size, 1) if size % 2 else (2, size // 2)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("rows", "columns"))
    for name, count in zip(("rows", "columns"), shape, strict=True):
        require_works(mesh.get_group(name))
        assert isinstance(communicator(mesh.get_group(name)), mpicomm.Communicator)
        assert communicator(mesh.get_group(name)).size == count
    require_works(mesh["rows", "columns"]._flatten().get_group())


def test_split_group(world: dist.ProcessGroup) -> None:
    """PyTorch's function wants a GPU, so the group is asked itself."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = [other for other in range(size) if other % 2 == rank % 2]
    part = world.split_group(mine, timedelta(seconds=HANG_S), group_name=f"part {rank % 2}")
    assert part is not None and (part.size(), part.rank()) == (len(mine), mine.index(rank))
    tensor = torch.tensor([float(rank)])
    part.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert float(tensor) == sum(mine)
    assert world.split_group([(rank + 1) % size] if size > 1 else [], group_name="others") is None or size == 1
    part.shutdown()


def test_a_group_that_is_destroyed_refuses_calls_and_the_others_go_on(world: dist.ProcessGroup) -> None:
    group = dist.new_group()
    require_works(group)
    dist.destroy_process_group(group)
    with pytest.raises((ValueError, RuntimeError), match="group"):
        dist.all_reduce(torch.ones(1), group=group)
    calls: tuple[Callable[[], object], ...] = (
        lambda: group.allreduce([torch.ones(1)]),
        lambda: group.send([torch.ones(1)], 0, 0),
        lambda: group.barrier(),
    )
    for call in calls:
        with pytest.raises(InvalidUsageError, match="the process group was destroyed or aborted; make another"):
            call()
    require_works(world)
