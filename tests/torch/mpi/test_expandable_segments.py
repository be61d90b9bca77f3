"""Tensors in PyTorch's expandable segments, which are virtual memory, as symmetric arrays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpicomm.torch

MIB = 1 << 20

pytestmark = pytest.mark.gpu_alone

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
