"""Works that PyTorch's code in C++ keeps after Python has dropped them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import mpicomm.torch
from tests.helpers.inputs.torch_cases import Case, Op, finish, reduced, require_same, while_the_last_rank_is_late

WIDTH = 6


def batches_of(rank: int) -> list[torch.Tensor]:
    """Return the batches of a rank. A later rank has more."""
    random = torch.Generator("cpu").manual_seed(rank)
    batches = [torch.randn(4, WIDTH, generator=random, device="cpu") for _ in range(1 + 2 * rank)]
    return [batch.to(torch.get_default_device()) for batch in batches]


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 1))


def require_trained_by_the_ranks_that_are_left(model: nn.Module, size: int, *, divide_by_all: bool) -> None:
    alone = network()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(1 + 2 * (size - 1)):
        left = [batches_of(rank)[step] for rank in range(size) if step < 1 + 2 * rank]
        optimizer.zero_grad()
        total = torch.stack([alone(batch).pow(2).mean() for batch in left]).sum()
        total.div(size if divide_by_all else len(left)).backward()
        optimizer.step()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("divide_by_all", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.0001}, None], ids=str)
def test_ranks_that_run_out_of_data(
    world: dist.ProcessGroup, options: dict[str, float] | None, divide_by_all: bool
) -> None:
    model = DistributedDataParallel(network(), **(options or {}))
    if options is None:
        model.register_comm_hook(None, mpicomm.torch.allreduce_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join(divide_by_initial_world_size=divide_by_all):
        for batch in batches_of(dist.get_rank()):
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
    divide_by_all |= options is None  # as the hook divides
    require_trained_by_the_ranks_that_are_left(model, dist.get_world_size(), divide_by_all=divide_by_all)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("is_over", [False, True])
def test_a_tensor_waits_for_its_work(world: dist.ProcessGroup, is_over: bool) -> None:
    case = Case(world)
    dist.all_reduce(case.own(4))  # on a GPU all ranks set up memory at the first call
    tensor = case.own(4)
    with while_the_last_rank_is_late():
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if not is_over:
            c10d._register_work(tensor, work=work)
    if is_over:
        work.wait()
        c10d._register_work(tensor, work)
    del work
    gc.collect()
    require_same([torch.ops._c10d_functional.wait_tensor(tensor)], [reduced(case.all(4), Op.SUM)])


@pytest.mark.mpi(min_size=2)
def test_a_work_as_an_argument_for_operators(world: dist.ProcessGroup) -> None:
    case = Case(world)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    got = case.empty(4)
    boxed = dist.irecv(got, before).boxed()
    sent = dist.isend(case.own(4), after)
    gc.collect()
    work = c10d.Work.unbox(boxed)
    work.wait()
    sent.wait()
    finish(case)
    require_same([got, *work.get_future().wait()], [case.of(before, 4)] * 2)


@pytest.mark.host_alone  # on a GPU the call itself raises
def test_the_error_of_a_work_reaches_those_who_keep_it(world: dist.ProcessGroup) -> None:
    boxed = dist.all_reduce(torch.ones(3) > 0, Op.AVG, async_op=True).boxed()
    gc.collect()
    with pytest.raises(RuntimeError, match=r"op=AVG is not defined for torch\.bool"):
        c10d.Work.unbox(boxed).get_future().wait()
    dist.barrier()


@pytest.mark.host_alone
def test_the_tensors_in_the_value_of_a_future_are_found_whatever_it_is() -> None:
    look: Any = torch._jit_internal._extract_tensors
    one, two = torch.ones(1), nn.Parameter(torch.ones(2))
    for value in (one, two, [one, one], [one, two], [], (one, [two]), [one, {"other": two}], None, "no tensor"):
        assert [id(each) for each in look(value)] == [id(each) for each in look.__wrapped__(value)]
