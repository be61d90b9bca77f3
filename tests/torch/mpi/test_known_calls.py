"""A call that was made before is known, and so is found without the Communicator's methods."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicomm.torch.collectives import TensorCalls
from mpicomm.torch.known_calls import TensorCall
from tests.helpers.fakes.planning_comm import PlanningComm

pytestmark = pytest.mark.host_alone

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@pytest.fixture(params=[0, 1])
def comm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> PlanningComm:
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cpu, raising=False)
    return PlanningComm(request.param)


def calls(comm: Any) -> dict[str, tuple[TensorCall, tuple[Any, ...]]]:
    """Return a call of each collective that may be known, and its arguments."""
    every = TensorCalls(comm)
    some, twice = torch.zeros(4, 3), torch.zeros(8, 3)
    splits = [3, 1], [1, 3]
    own = comm.rank
    return {
        "Allreduce": (every.all_reduce, (some, AVG, "tensor", None)),
        "Reduce": (every.reduce, (some, SUM, 0)),
        "Bcast": (every.broadcast, (some, 1)),
        "Allgather": (every.all_gather, (twice, some)),
        "Allgather in place": (every.all_gather, (twice, twice[4 * own : 4 * own + 4])),
        "Reduce_scatter_block": (every.reduce_scatter, (some, twice, SUM)),
        "Alltoallv": (every.all_to_all, (some, torch.ones(4, 3), [], [])),
        "Alltoallv with splits": (every.all_to_all, (some, torch.ones(4, 3), splits[own], splits[own])),
    }


NAMES = list(calls(SimpleNamespace(rank=0, size=2, _session=SimpleNamespace(channel=None))))


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_known_after_it_was_made(comm: PlanningComm, name: str) -> None:
    call, given = calls(comm)[name]
    assert call.find(comm.cache, given) is None
    call.carry_out(*given)
    known = call.find(comm.cache, given)
    assert known is not None and known.plan.text == name.split()[0]


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
    call, (tensor, *others) = calls(comm)["Bcast"]
    call.carry_out(tensor, *others)
    assert not call.find(comm.cache, (changed(tensor), *others))


@pytest.mark.parametrize("rows", [(4,), (4, 3)], ids=["of numbers", "of rows"])
def test_only_splits_that_share_all_rows_are_known(comm: PlanningComm, rows: tuple[int, ...]) -> None:
    comm.knows_forms = True
    call = TensorCalls(comm).all_to_all  # type: ignore[arg-type]
    received, sent = torch.zeros(rows), torch.zeros(rows)
    call.carry_out(received, sent, [], [])
    assert call.find(comm.cache, (received, sent, [1, 3], [3, 1]))
    for wrong in ([1, 2], [2, 3], [4], [1, 1, 2]):
        assert not call.find(comm.cache, (received, sent, wrong, [3, 1]))
        assert not call.find(comm.cache, (received, sent, [1, 3], wrong))
    odd = torch.zeros(3, *rows[1:])
    assert call.find(comm.cache, (odd, sent, [1, 2], []))
    assert not call.find(comm.cache, (odd, sent, [], []))


def test_a_sum_with_factors_is_not_known(comm: PlanningComm) -> None:
    every, tensor = TensorCalls(comm), torch.zeros(4)  # type: ignore[arg-type]
    for op in (SUM, dist._make_nccl_premul_sum(2.0)):
        every.all_reduce.carry_out(tensor, op, "tensor", None)
    assert every.all_reduce.find(comm.cache, (tensor, SUM, "tensor", None))
    assert not every.all_reduce.find(comm.cache, (tensor, dist._make_nccl_premul_sum(2.0), "tensor", None))
