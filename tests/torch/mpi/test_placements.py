"""Splits of DTensors, compared with PyTorch's own redistribution."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

import mpicomm
import mpicomm.torch

pytestmark = pytest.mark.usefixtures("world")


@pytest.mark.parametrize(
    ("from_", "to"), [(Shard(0), Shard(1)), (Shard(1), Replicate()), (Replicate(), Shard(0)), (Shard(0), Shard(0))]
)
@pytest.mark.parametrize("shape", [(7, 5), (2, 4, 3)])
def test_a_dtensor_takes_another_split(device: torch.device, shape: tuple[int, ...], from_: Any, to: Any) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    given = torch.arange(torch.Size(shape).numel(), device=device, dtype=torch.float32).reshape(shape)
    tensor = distribute_tensor(given, mesh, [from_])
    before, after = (mpicomm.torch.split_of(shape, mesh, [placement]) for placement in (from_, to))
    comm = mpicomm.torch.communicator()
    with comm.redistribution(shape, tensor.dtype, before, after) as plan:
        x = tensor.to_local().contiguous()
        out = torch.empty(plan.target_shape, device=device)
        plan(x, out)
    assert torch.equal(out, tensor.redistribute(mesh, [to]).to_local())


def test_boxes_are_those_of_pytorch_on_a_mesh_of_two_dimensions(device: torch.device) -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh(device.type, (1, size))
    boxes = mpicomm.torch.split_of((9, 4), mesh, [Shard(0), Shard(0)])
    tensor = distribute_tensor(torch.zeros(9, 4, device=device), mesh, [Shard(0), Shard(0)])
    (start, stop), _ = boxes[dist.get_rank()]
    assert stop - start == len(tensor.to_local())
    assert boxes[0][0][0] == 0 and boxes[-1][0][1] == 9


def test_placements_without_boxes(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    with pytest.raises(mpicomm.InvalidUsageError, match="redistribute the DTensor to Shard or Replicate first"):
        mpicomm.torch.split_of((4, 4), mesh, [Partial()])
    with pytest.raises(mpicomm.InvalidUsageError, match="pass one for each"):
        mpicomm.torch.split_of((4, 4), mesh, [])
    for axis in (2, -3):
        with pytest.raises(mpicomm.InvalidUsageError, match=rf"an array of shape \(4, 4\) has no axis {axis}"):
            mpicomm.torch.split_of((4, 4), mesh, [Shard(axis)])
    assert mpicomm.torch.split_of(4, mesh, Shard(-1)) == mpicomm.torch.split_of((4,), mesh, [Shard(0)])


def test_a_dtensor_is_no_array(device: torch.device) -> None:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    tensor = distribute_tensor(torch.zeros(6, 4, device=device), mesh, [Replicate()])
    comm, said = mpicomm.torch.communicator(), r"has no memory of its own: pass the tensor in it, .*\.to_local\(\)"
    for call in (
        lambda: comm.redistribute(tensor, from_=None, to=0),
        lambda: comm.Bcast(tensor),
        lambda: comm.Allreduce(tensor, torch.empty(6, 4, device=device)),
        lambda: dist.all_reduce(tensor),
    ):
        with pytest.raises(mpicomm.InvalidUsageError, match=said):
            call()
