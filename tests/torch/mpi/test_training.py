"""Training on several ranks gives the parameters of one rank; splits of DTensors are those of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpicomm
import mpicomm.torch
from mpicomm.errors import InvalidUsageError
from mpicomm.torch import AllreduceState, allreduce_hook

TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
"""Of parameters after some steps in float32: ranks add gradients in another order than one rank."""
STEPS = 3
BATCH = 12  # 1 to 4 ranks share it equally
WIDTH = 12


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator("cpu").manual_seed(step)
    given, wanted = (torch.randn(BATCH, width, generator=random, device="cpu") for width in (WIDTH, 4))
    return given.to(torch.get_default_device()), wanted.to(torch.get_default_device())


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    # On a GPU the steps of many tensors at once, "foreach", refuse a model with DTensors and other tensors.
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=False)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, part: Callable[[torch.Tensor], torch.Tensor], steps: int = STEPS
) -> None:
    for step in range(steps):
        given, wanted = (part(each) for each in batch(step))
        optimizer.zero_grad()
        nn.functional.mse_loss(model(given), wanted).backward()
        optimizer.step()


def trained_by_one_rank(steps: int = STEPS) -> list[torch.Tensor]:
    model = network()
    train(model, sgd(model.parameters()), lambda tensor: tensor, steps)
    return [parameter.detach() for parameter in model.parameters()]


def require_trained(parameters: Sequence[torch.Tensor], steps: int = STEPS) -> None:
    """Assert that the parameters are equal to the parameters of one rank."""
    for mine, right in zip(parameters, trained_by_one_rank(steps), strict=True):
        whole = mine.full_tensor() if isinstance(mine, DTensor) else mine
        torch.testing.assert_close(whole.detach(), right, **TOLERANCE)


@pytest.fixture
def mesh(world: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for layer in (*model[::2], model):
        fully_shard(layer, mesh=mesh)
    return model


def sharded_in_groups_that_are_replicated(mesh: DeviceMesh) -> nn.Module:
    shape = (mesh.size(), 1) if mesh.size() % 2 else (2, mesh.size() // 2)
    groups = init_device_mesh(mesh.device_type, shape, mesh_dim_names=("replicas", "shards"))
    return fully_shard(network(), mesh=groups)


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(network(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


WAYS: dict[str, Callable[[DeviceMesh], nn.Module]] = {
    "plain": lambda mesh: DistributedDataParallel(network()),
    "many buckets": lambda mesh: DistributedDataParallel(network(), bucket_cap_mb=0.0005),
    "gradients in buckets": lambda mesh: DistributedDataParallel(network(), gradient_as_bucket_view=True),
    "static graph": lambda mesh: DistributedDataParallel(network(), static_graph=True),
    "unused parameters": lambda mesh: DistributedDataParallel(network(), find_unused_parameters=True),
    "zero redundancy optimizer": lambda mesh: DistributedDataParallel(network()),
    "sharded": sharded,
    "sharded in groups that are replicated": sharded_in_groups_that_are_replicated,
    "tensor parallel": tensor_parallel,
}


@pytest.mark.parametrize("way", WAYS)
def test_training(mesh: DeviceMesh, way: str) -> None:
    model = WAYS[way](mesh)
    optimizer = sgd(model.parameters())
    if way == "zero redundancy optimizer":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, optimizer, (lambda tensor: tensor) if way == "tensor parallel" else share)
    require_trained(list(model.parameters()))


def test_data_parallel_repeats_its_buckets_beside_other_calls(world: dist.ProcessGroup) -> None:
    model, steps = DistributedDataParallel(network(), bucket_cap_mb=0.0005, gradient_as_bucket_view=True), 2 * BATCH
    optimizer = sgd(model.parameters())

    def spoil(*_: Any) -> None:
        for parameter in model.parameters():  # its gradient lies in a bucket
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad, dist.ReduceOp.MAX)

    optimizer.register_step_post_hook(spoil)
    train(model, optimizer, share, steps)
    require_trained(list(model.parameters()), steps)


@pytest.mark.parametrize("divide_by_all", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0005}, None], ids=str)
def test_ranks_that_run_out_of_data(
    world: dist.ProcessGroup, options: dict[str, Any] | None, divide_by_all: bool
) -> None:
    model, rank, size = DistributedDataParallel(network(), **(options or {})), dist.get_rank(), dist.get_world_size()
    if options is None:
        model.register_comm_hook(None, allreduce_hook)
    optimizer = sgd(model.parameters())
    with model.join(divide_by_initial_world_size=divide_by_all):
        train(model, optimizer, share, 1 + 2 * rank)
    alone = network()
    optimizer = sgd(alone.parameters())
    for step in range(1 + 2 * (size - 1)):
        given, wanted = (tensor.chunk(size) for tensor in batch(step))
        left = [each for each in range(size) if step < 1 + 2 * each]
        optimizer.zero_grad()
        total = torch.stack([nn.functional.mse_loss(alone(given[each]), wanted[each]) for each in left]).sum()
        total.div(size if divide_by_all or options is None else len(left)).backward()  # the hook divides by all
        optimizer.step()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, right, **TOLERANCE)


def test_data_parallel_gives_the_first_ranks_buffers_to_all(world: dist.ProcessGroup) -> None:
    model = DistributedDataParallel(nn.BatchNorm1d(WIDTH))
    for step in range(3):
        model(share(batch(step)[0]) + dist.get_rank())
    model(torch.zeros(2, WIDTH))  # the buffers go out at the beginning of a step
    means = MPI.COMM_WORLD.allgather(model.module.running_mean.tolist())
    assert all(mean == means[0] for mean in means)
    assert int(model.module.num_batches_tracked) == 4


@pytest.mark.gpu_alone
def test_fully_sharded_through_symmetric_memory(mesh: DeviceMesh) -> None:
    def symmetric_nbytes() -> int:
        return sum(use.device_nbytes for use in comm.describe().memory if use.purpose == "symmetric arrays")

    comm = mpicomm.torch.communicator(mesh.get_group())
    model = network()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh).set_allocate_memory_from_process_group_for_comm(True)
    optimizer = sgd(model.parameters())
    before = symmetric_nbytes()
    train(model, optimizer, share)
    require_trained(list(model.parameters()))
    after = symmetric_nbytes()
    assert after > before
    train(model, optimizer, share)
    assert symmetric_nbytes() == after


def test_tensors_over_ranks(mesh: DeviceMesh) -> None:
    left, right = torch.randn(13, 7), torch.randn(7, 11)
    for tensor in (left, right):
        dist.broadcast(tensor, 0)
    rows, columns = distribute_tensor(left, mesh, [Shard(0)]), distribute_tensor(right, mesh, [Shard(1)])
    for layout in ([Replicate()], [Shard(1)], [Shard(0)]):
        torch.testing.assert_close(rows.redistribute(mesh, layout).full_tensor(), left, rtol=0, atol=0)
    partial = DTensor.from_local(left, mesh, [Partial()])
    torch.testing.assert_close(partial.redistribute(mesh, [Shard(0)]).full_tensor(), left * mesh.size(), **TOLERANCE)
    torch.testing.assert_close((rows @ columns).full_tensor(), left @ right, **TOLERANCE)
    inner = distribute_tensor(left, mesh, [Shard(1)]) @ distribute_tensor(right, mesh, [Shard(0)])
    torch.testing.assert_close(inner.full_tensor(), left @ right, **TOLERANCE)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(world: dist.ProcessGroup, device: torch.device, schedule: Any) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(size)]
    alone = copy.deepcopy(nn.Sequential(*layers))
    given, wanted = batch(0)[0], batch(1)[0]
    nn.functional.mse_loss(alone(given), wanted).backward()

    stage = PipelineStage(layers[rank], rank, size, device)
    pipeline = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    if rank == 0:
        pipeline.step(given)
    elif rank == size - 1:
        losses: list[torch.Tensor] = []
        output = pipeline.step(target=wanted, losses=losses)
        torch.testing.assert_close(output, alone(given), **TOLERANCE)
    else:
        pipeline.step()
    for mine, right in zip(layers[rank].parameters(), alone[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, **TOLERANCE)


def test_a_checkpoint_of_sharded_parameters(mesh: DeviceMesh, tmp_path: Path) -> None:
    folder = MPI.COMM_WORLD.bcast(str(tmp_path / "checkpoint"))
    model = fully_shard(network(), mesh=mesh)
    train(model, sgd(model.parameters()), share)
    checkpoint.save(get_model_state_dict(model), checkpoint_id=folder)
    other = network()
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    fully_shard(other, mesh=mesh)
    state = get_model_state_dict(other)
    checkpoint.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    require_trained(list(other.parameters()))


def trained(state: object, *, hook: bool = True, builtin: dist.BuiltinCommHookType | None = None) -> torch.Tensor:
    """Return the parameters after some steps; the ranks see different data."""
    model = DistributedDataParallel(network(), bucket_cap_mb=0.0005)  # several buckets, others after the first step
    if builtin is not None:
        model._register_builtin_comm_hook(builtin)
    elif hook:
        model.register_comm_hook(state, allreduce_hook)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), share)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def test_the_hook_gives_the_parameters_of_ddp(world: dist.ProcessGroup) -> None:
    # DDP divides before the sum, and the hook after it, so the results differ in rounding.
    torch.testing.assert_close(trained(None), trained(None, hook=False), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(trained(AllreduceState(world)), trained(None), rtol=0, atol=0)


# A step changes a parameter by a gradient of less than 1, times 0.1. In 16 bits it is rounded to 8 bits or more. Of
# quantized gradients the mean differs by at most a part of their largest magnitudes.
@pytest.mark.parametrize(
    ("wire_dtype", "error"),
    [
        (torch.bfloat16, 2**-8),
        (torch.float16, 2**-8),
        (torch.float8_e4m3fn, (2 + 1 / 16) / 16),
        (torch.int8, (2 + 1 / 127) / 127),
    ],
)
def test_gradients_travel_in_fewer_bytes(world: dist.ProcessGroup, wire_dtype: torch.dtype, error: float) -> None:
    exact, got = trained(None), trained(AllreduceState(wire_dtype=wire_dtype))
    torch.testing.assert_close(got, exact, rtol=0, atol=STEPS * 0.1 * error)
    # Each rank rounds its own gradients, and the kernel their mean.
    assert dist.get_world_size() == 1 or not torch.equal(got, exact)
    gathered = [torch.empty_like(got) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, got)
    assert all(torch.equal(each, got) for each in gathered)


def test_the_hooks_that_pytorch_has_built_in(world: dist.ProcessGroup) -> None:
    exact = trained(None)
    got = trained(None, builtin=dist.BuiltinCommHookType.ALLREDUCE)
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-7)
    got = trained(None, builtin=dist.BuiltinCommHookType.FP16_COMPRESS)
    torch.testing.assert_close(got, exact, rtol=0, atol=STEPS * 0.1 * 2**-8)
    assert dist.get_world_size() == 1 or not torch.equal(got, exact)


def test_other_types_and_groups_are_refused(world: dist.ProcessGroup) -> None:
    with pytest.raises(InvalidUsageError, match=r"wire_dtype=torch.int16: pass torch.bfloat16"):
        AllreduceState(wire_dtype=torch.int16)
    other = dist.new_group(backend="gloo")
    with pytest.raises(InvalidUsageError, match="is no group of mpicomm"):
        AllreduceState(other)
    with pytest.raises(InvalidUsageError, match=r"state='bf16' .*pass None, a group, or AllreduceState\(wire_dtype="):
        trained("bf16")


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
