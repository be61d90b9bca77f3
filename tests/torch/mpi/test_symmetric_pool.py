"""Tensors in symmetric memory: collectives take them, and their memory is used again when they are gone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import mpicomm.torch
from mpicomm.torch.symmetric_pool import SymmetricPool


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


def test_memory_stays_with_its_stream(pool: SymmetricPool) -> None:
    address = pool.allocate((16,), torch.int64, stream=1).data_ptr()
    other = pool.allocate((16,), torch.int64, stream=2)
    assert other.data_ptr() != address
    assert pool.allocate((16,), torch.int64, stream=1).data_ptr() == address


def test_empty_tensors_have_no_elements(pool: SymmetricPool) -> None:
    assert pool.allocate((0, 3), torch.float32).shape == (0, 3)


def test_a_group_lends_symmetric_memory_on_gpus_alone(world: dist.ProcessGroup) -> None:
    assert not world.supports_tensor_alloc(torch.device("cpu"))
    tensor = world.allocate_tensor(6, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (tensor.shape, tensor.dtype) == ((6,), torch.bfloat16)
