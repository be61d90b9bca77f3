"""Tensors in symmetric memory, also in PyTorch's expandable segments, whose memory is virtual."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm.torch
from mpicomm.torch.streams import SymmetricPool
from tests.helpers.inputs.torch_cases import while_the_last_rank_is_late

COUNT = 1 << 18


@pytest.fixture
def pool(world: dist.ProcessGroup) -> SymmetricPool:
    return SymmetricPool(mpicomm.torch.communicator(world))


def test_a_tensor_takes_part_in_collectives(pool: SymmetricPool) -> None:
    tensor = pool.allocate((3, 5), torch.float64)
    assert (tensor.shape, tensor.dtype) == ((3, 5), torch.float64)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert (tensor == sum(range(1, dist.get_world_size() + 1))).all()


def test_memory_is_used_again_when_the_last_view_is_gone(pool: SymmetricPool) -> None:
    tensor = pool.allocate((4, 8), torch.float32)
    view, address = tensor[1:], tensor.data_ptr()
    del tensor
    assert pool.allocate((4, 8), torch.float32).data_ptr() != address
    del view
    assert pool.allocate((32,), torch.int32).data_ptr() == address


@pytest.mark.gpu_alone
def test_memory_stays_with_its_stream(pool: SymmetricPool) -> None:
    first, second = (torch.cuda.Stream().cuda_stream for _ in range(2))
    address = pool.allocate((16,), torch.int64, first).data_ptr()
    other = pool.allocate((16,), torch.int64, second)
    assert other.data_ptr() != address
    assert pool.allocate((16,), torch.int64, first).data_ptr() == address


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


def test_empty_tensors_have_no_elements(pool: SymmetricPool) -> None:
    assert pool.allocate((0, 3), torch.float32).shape == (0, 3)


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
