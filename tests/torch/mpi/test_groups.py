"""Groups of some ranks: how they begin, their calls, their ends, and the symmetric memory that they lend."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch.distributed.device_mesh import init_device_mesh

import mpicomm
import mpicomm.torch
from mpicomm import InvalidUsageError
from mpicomm.torch import communicator
from mpicomm.torch.streams import SymmetricPool
from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same, while_the_last_rank_is_late
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
    part = world.split_group(mine, timedelta(seconds=HANG_S), group_name=f"part {rank % 2}", group_desc="a half")
    assert part is not None and (part.size(), part.rank()) == (len(mine), mine.index(rank))
    assert (part.group_name, part.group_desc) == (f"part {rank % 2}", "a half")
    tensor = torch.tensor([float(rank)])
    part.allreduce([tensor], dist.AllreduceOptions()).wait()
    assert float(tensor) == sum(mine)
    assert world.split_group([(rank + 1) % size] if size > 1 else [], group_name="others") is None or size == 1
    part.shutdown()


def test_a_group_says_that_it_cannot_estimate_times(world: dist.ProcessGroup, device: torch.device) -> None:
    """PyTorch's compiler asks, too, and estimates the times itself."""
    with (
        pytest.raises(NotImplementedError, match="time estimator is not supported"),
        dist._time_estimator(world, device),
    ):
        pass


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


COUNT = 1 << 18


@pytest.fixture
def pool(world: dist.ProcessGroup) -> SymmetricPool:
    return SymmetricPool(mpicomm.torch.communicator(world))


def test_a_tensor_takes_part_in_collectives(pool: SymmetricPool) -> None:
    tensor = pool.allocate(15, torch.float64)
    assert (tensor.shape, tensor.dtype) == ((15,), torch.float64)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert (tensor == sum(range(1, dist.get_world_size() + 1))).all()
    assert pool.allocate(0, torch.float32).shape == (0,)


def test_memory_is_used_again_when_the_last_view_is_gone(pool: SymmetricPool) -> None:
    tensor = pool.allocate(32, torch.float32)
    view, address = tensor[1:], tensor.data_ptr()
    del tensor
    assert pool.allocate(32, torch.float32).data_ptr() != address
    del view
    assert pool.allocate(32, torch.int32).data_ptr() == address


@pytest.mark.gpu_alone
def test_memory_stays_with_its_stream(pool: SymmetricPool) -> None:
    first, second = (torch.cuda.Stream().cuda_stream for _ in range(2))
    address = pool.allocate(16, torch.int64, first).data_ptr()
    other = pool.allocate(16, torch.int64, second)
    assert other.data_ptr() != address
    assert pool.allocate(16, torch.int64, first).data_ptr() == address


@pytest.mark.gpu_alone
@pytest.mark.mpi(min_size=2)
def test_memory_that_a_call_still_uses_is_not_written_by_its_next_user(
    world: dist.ProcessGroup, device: torch.device
) -> None:
    def tensor(value: float) -> torch.Tensor:
        return world.allocate_tensor(COUNT, dtype=torch.float32, device=device).fill_(value)

    dist.all_reduce(tensor(1.0), async_op=True).wait()
    address = tensor(1.0).data_ptr()
    torch.cuda.synchronize()
    with while_the_last_rank_is_late():
        dist.all_reduce(tensor(1.0), async_op=True)  # neither the tensor nor the work is kept
        after = tensor(7.0)
    torch.cuda.synchronize()
    assert after.data_ptr() == address
    assert (after == 7).all()


def test_a_group_lends_symmetric_memory_only_on_gpus(world: dist.ProcessGroup) -> None:
    assert not world.supports_tensor_alloc(torch.device("cpu"))
    tensor = world.allocate_tensor(6, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((6,), torch.bfloat16)


MIB = 1 << 20

# PyTorch has moved the function, which is not public.
set_allocator = getattr(torch._C, "_accelerator_setAllocatorSettings", torch.cuda.memory._set_allocator_settings)


@pytest.fixture
def expandable(device: torch.device) -> Iterator[None]:
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:True")
    yield
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    set_allocator("expandable_segments:False")


@pytest.mark.gpu_alone
@pytest.mark.parametrize("count", [1000, 13 * MIB], ids=["in one allocation", "in several allocations"])
def test_a_tensor_is_registered(expandable: None, world: dist.ProcessGroup, count: int) -> None:
    comm = mpicomm.torch.communicator(world)
    rank, size = comm.rank, comm.size
    right, left = (rank + 1) % size, (rank - 1) % size
    before = torch.empty(1 + 997 * rank)  # so that the tensors of the ranks begin at different places
    values = (torch.arange(count) % 65521).float()  # so that float32 has all sums exactly
    tensor = values + rank
    torch.cuda.synchronize()
    with comm.register(tensor) as array:
        comm.Barrier(stream=torch.cuda.current_stream())
        assert torch.equal(torch.from_dlpack(array.get(right)), values + right)
        comm.Barrier(stream=torch.cuda.current_stream())
        comm.Allreduce(MPI.IN_PLACE, tensor)
        assert torch.equal(tensor, values * size + sum(range(size)))
        array.peer(right)[-1] = -1.0 - rank
        comm.Barrier(stream=torch.cuda.current_stream())
    assert tensor[-1].item() == -1.0 - left
    del before
