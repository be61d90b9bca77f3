"""A call that was made before is known, and so is found without the Communicator's methods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicomm.torch.collectives import Collective, collectives_of
from tests.helpers.fakes.planning_comm import PlanningComm

pytestmark = pytest.mark.host_alone

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@pytest.fixture(params=[0, 1])
def comm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PlanningComm:
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cpu, raising=False)
    return PlanningComm(request.param)


def calls(rank: int) -> dict[str, tuple[str, tuple[Any, ...]]]:
    """Return calls of each collective that may be known, as PyTorch's name and the arguments."""
    some, twice = torch.zeros(4, 3), torch.zeros(8, 3)
    splits = [3, 1], [1, 3]
    return {
        "Allreduce": ("all_reduce", (some, AVG, "tensor", None)),
        "Reduce": ("reduce", (some, SUM, 0)),
        "Bcast": ("broadcast", (some, 1)),
        "Allgather": ("all_gather_into_tensor", (twice, some)),
        "Allgather in place": ("all_gather_into_tensor", (twice, twice[4 * rank : 4 * rank + 4])),
        "Reduce_scatter_block": ("reduce_scatter_tensor", (some, twice, SUM)),
        "Alltoallv": ("all_to_all_single", (some, torch.ones(4, 3), [], [])),
        "Alltoallv with splits": ("all_to_all_single", (some, torch.ones(4, 3), splits[rank], splits[rank])),
    }


def call_of(comm: Any, name: str) -> tuple[Collective, tuple[Any, ...]]:
    collective, given = calls(comm.rank)[name]
    return collectives_of(comm)[collective], given


@pytest.mark.parametrize("name", calls(0))
def test_a_call_is_known_after_it_was_made(comm: PlanningComm, name: str) -> None:
    call, given = call_of(comm, name)
    assert call.find(comm.cache, given) is None
    call.carry_out(*given)
    known = call.find(comm.cache, given)
    assert known is not None and known.text == name.split()[0]


@pytest.mark.parametrize(
    "changed",
    [
        lambda tensor: tensor.requires_grad_(),
        lambda tensor: torch._neg_view(tensor),
        lambda tensor: tensor.view(torch.int32),
        lambda tensor: tensor[1:],
        lambda tensor: torch.nn.Parameter(tensor),
    ],
)
def test_another_view_of_the_same_memory_is_not_known(comm: PlanningComm, changed: Callable[[Any], Any]) -> None:
    call, (tensor, *others) = call_of(comm, "Bcast")
    call.carry_out(tensor, *others)
    assert not call.find(comm.cache, (changed(tensor), *others))


@pytest.mark.parametrize("rows", [(4,), (4, 3)], ids=["of numbers", "of rows"])
def test_only_splits_that_share_all_rows_are_known(comm: Any, rows: tuple[int, ...]) -> None:
    comm.knows_forms = True
    call = collectives_of(comm)["all_to_all_single"]
    received, sent = torch.zeros(rows), torch.zeros(rows)
    call.carry_out(received, sent, [], [])
    assert call.find(comm.cache, (received, sent, [1, 3], [3, 1]))
    for wrong in ([1, 2], [2, 3], [4], [1, 1, 2]):
        assert not call.find(comm.cache, (received, sent, wrong, [3, 1]))
        assert not call.find(comm.cache, (received, sent, [1, 3], wrong))
    odd = torch.zeros(3, *rows[1:])
    assert call.find(comm.cache, (odd, sent, [1, 2], []))
    assert not call.find(comm.cache, (odd, sent, [], []))


def test_a_sum_with_factors_is_not_known(comm: Any) -> None:
    all_reduce, tensor = collectives_of(comm)["all_reduce"], torch.zeros(4)
    for op in (SUM, dist._make_nccl_premul_sum(2.0)):
        all_reduce.carry_out(tensor, op, "tensor", None)
    assert all_reduce.find(comm.cache, (tensor, SUM, "tensor", None))
    assert not all_reduce.find(comm.cache, (tensor, dist._make_nccl_premul_sum(2.0), "tensor", None))
