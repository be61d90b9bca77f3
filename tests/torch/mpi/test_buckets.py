"""All-reduces of code in C++, such as the buckets of DDP, on a GPU that has the memory of the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpicomm.torch.streams as module
from mpicomm.api.door import Door
from mpicomm.torch.collectives import collectives_of
from mpicomm.torch.streams import Streams
from tests.helpers.fakes.planning_comm import PlanningComm

pytestmark = pytest.mark.host_alone

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class Rank:
    """The stream of a rank's group; ``enqueued`` has the plans in the order of their launches."""

    def __init__(self) -> None:
        self.enqueued: list[Any] = []
        comm: Any = PlanningComm(0)
        comm.device = 0
        comm.cache.engine.enqueue = lambda plan, stream, event: self.enqueued.append((plan, stream))
        marks = SimpleNamespace(mark=lambda stream: None, wait_stream=lambda *_: None)
        backend = SimpleNamespace(side_streams=marks, lasting_streams=set())
        comm._session.gpu, comm._session.require_usable = lambda what: backend, lambda what: None
        comm._collectives = SimpleNamespace(expect_alike=lambda: None)
        comm._door = Door(comm, comm._session, SimpleNamespace(gpu=comm.cache))  # type: ignore[arg-type]
        self.comm, self.all_reduce, self.streams = comm, collectives_of(comm)["all_reduce"], Streams(comm)
        self.streams.devices = []  # futures of this PyTorch may have no GPU

    def make(self, tensor: torch.Tensor, op: Any = SUM) -> None:
        self.all_reduce.carry_out(tensor, op, "tensor", None)

    def bucket(self, tensor: torch.Tensor, op: Any = SUM) -> str | None:
        """Return the text of the plan that a bucket enqueues, None if it enqueues none."""
        before = len(self.enqueued)
        future = self.streams.bucket(self.all_reduce, tensor, op)
        assert len(self.enqueued) - before == (future is not None)
        if future is None:
            return None
        assert future.value() is tensor
        plan, stream = self.enqueued[-1]
        assert stream == 9
        return str(plan.text)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cpu, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(module, "current_stream", lambda gpu: 7)
    monkeypatch.setattr(module, "call_on", lambda stream, call, *given: call(*given))
    return Rank()


def test_only_a_known_bucket_is_enqueued(rank: Rank) -> None:
    tensor = torch.zeros(12)
    assert rank.bucket(tensor) is None
    rank.make(tensor)
    assert [rank.bucket(tensor) for _ in range(3)] == ["Allreduce"] * 3
    assert rank.bucket(tensor, AVG) is None
    for changed in (
        tensor.view(torch.int32),
        tensor[1:],
        tensor.view(3, 4).t(),
        torch._neg_view(tensor),
        torch.nn.Parameter(tensor),
        tensor.detach().requires_grad_(),
    ):
        assert rank.bucket(changed) is None
    assert rank.bucket(tensor) == "Allreduce"


def test_a_conjugated_view_of_a_bucket_is_not_the_bucket(rank: Rank) -> None:
    tensor = torch.zeros(6, dtype=torch.complex64)
    rank.make(tensor)
    assert rank.bucket(tensor) == "Allreduce"
    assert rank.bucket(tensor.conj()) is None


def test_each_bucket_of_a_known_form_is_filled_in(rank: Rank) -> None:
    rank.comm.knows_forms = True
    first, second = torch.zeros(12), torch.zeros(8)
    rank.make(torch.zeros(4))
    assert [rank.bucket(tensor) for tensor in (first, second, first, second)] == ["a form"] * 4
    filled = [received[:2] for _, received in rank.comm.form.filled]
    assert filled == [(tensor.data_ptr(), tensor.numel()) for tensor in (first, second, first, second)]


def test_a_bucket_is_forgotten_with_the_symmetric_arrays(rank: Rank) -> None:
    tensor = torch.zeros(12)
    rank.make(tensor)
    assert rank.bucket(tensor)
    rank.comm._session.mappings.version += 1
    assert rank.bucket(tensor) is None
    rank.make(tensor)
    assert rank.bucket(tensor)


def test_an_old_plan_is_not_enqueued(rank: Rank) -> None:
    tensor = torch.zeros(12)
    rank.make(tensor)
    assert rank.bucket(tensor)
    plan, _ = rank.enqueued[-1]
    plan.is_old = True
    assert rank.bucket(tensor) is None
