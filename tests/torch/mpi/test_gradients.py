"""DistributedDataParallel with `allreduce_hook` trains as without it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mpicomm.errors import InvalidUsageError
from mpicomm.torch import AllreduceState, allreduce_hook

STEPS = 3


def trained(state: object, *, hook: bool = True, builtin: dist.BuiltinCommHookType | None = None) -> torch.Tensor:
    """Return the parameters after some steps; the ranks see different data."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 10))
    model = DistributedDataParallel(network, bucket_cap_mb=0.05)  # several buckets, and others after the first step
    if builtin is not None:
        model._register_builtin_comm_hook(builtin)
    elif hook:
        model.register_comm_hook(state, allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        torch.manual_seed(100 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in network.parameters()])


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
