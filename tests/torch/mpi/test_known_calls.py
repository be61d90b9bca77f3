"""A call that was made before is known, and so is found without the Communicator's methods."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mpicomm.collectives.gpu.algorithms.base import NO_CHOICE
from mpicomm.collectives.gpu.call_templates import CallTemplate
from mpicomm.collectives.gpu.plan_cache import PlanCache
from mpicomm.collectives.operations import OPERATIONS
from mpicomm.errors import MpicommError
from mpicomm.sharing.segments import Mappings
from mpicomm.torch import streams
from mpicomm.torch.collectives import Collective, collectives_of

pytestmark = pytest.mark.host_alone

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


class TemplateOfForm(CallTemplate):
    """The plan of all calls of a form. ``filled`` has the buffers of each call that was filled in."""

    text = "a form"
    choice = NO_CHOICE

    def __init__(self) -> None:
        self.filled: list[Any] = []

    def takes(self, *buffers: Any) -> bool:
        return True

    def fill(self, *buffers: Any) -> bool:
        self.filled.append(buffers)
        return True


class PlanningComm:
    """The Communicator of a rank of two, which plans all calls that it gets. The GPU has the memory of the host."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.knows_forms = False
        """Whether all calls of a form are known after the first one, whatever their counts."""
        session: Any = SimpleNamespace(mappings=Mappings(), tracer=None)
        self._session = session
        self.form = TemplateOfForm()
        engine: Any = SimpleNamespace()
        self.cache = PlanCache(session, engine)

    def __getattr__(self, name: str) -> Callable[..., None]:
        operation = OPERATIONS[name]

        def call(send: Any, receive: Any = None, op: Any = None, root: int = 0, *, algorithm: str, **_: Any) -> None:
            if name == "Bcast":
                send, receive, op, root = None, send, None, receive
            plan: Any = SimpleNamespace(text=name, lasts=True, template_of=lambda: self.form)
            key = (operation, algorithm, send, receive, op if operation.reduces else None, root, None, None, None)
            read: Any = SimpleNamespace(operands=(), in_place=False) if self.knows_forms else None
            self.cache.add(plan, key, by_output=False, read=read)

        return call


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
        "Alltoallv of lists": ("all_to_all", ([some, torch.zeros(12)], [torch.ones(4, 3)] * 2, (), ())),
        "Alltoallv between inputs": ("all_to_all", (list(twice[::4]), list(twice[1::4].neg()), (), ())),
        "Allgatherv": ("all_gather", ([some[3:], twice], (some[3:], twice)[rank].clone())),
        "Allgatherv in place": ("all_gather", ([twice[4:], twice[:4]], twice[4 - 4 * rank :][:4])),
    }


def call_of(comm: Any, name: str) -> tuple[Collective, tuple[Any, ...]]:
    collective, given = calls(comm.rank)[name]
    return collectives_of(comm)[collective], given


@pytest.mark.parametrize("name", calls(0))
def test_a_call_is_known_after_it_was_made(comm: PlanningComm, name: str) -> None:
    call, given = call_of(comm, name)
    assert call.find_plan(comm.cache, given) is None
    call.run(*given)
    known = call.find_plan(comm.cache, given)
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
    call.run(tensor, *others)
    assert not call.find_plan(comm.cache, (changed(tensor), *others))


@pytest.mark.parametrize("rows", [(4,), (4, 3)], ids=["of numbers", "of rows"])
def test_only_splits_that_share_all_rows_are_known(comm: Any, rows: tuple[int, ...]) -> None:
    comm.knows_forms = True
    call = collectives_of(comm)["all_to_all_single"]
    received, sent = torch.zeros(rows), torch.zeros(rows)
    call.run(received, sent, [], [])
    assert call.find_plan(comm.cache, (received, sent, [1, 3], [3, 1]))
    for wrong in ([1, 2], [2, 3], [4], [1, 1, 2]):
        assert not call.find_plan(comm.cache, (received, sent, wrong, [3, 1]))
        assert not call.find_plan(comm.cache, (received, sent, [1, 3], wrong))
    odd = torch.zeros(3, *rows[1:])
    assert call.find_plan(comm.cache, (odd, sent, [1, 2], []))
    assert not call.find_plan(comm.cache, (odd, sent, [], []))


def test_lists_whose_tensors_cannot_stay_in_place_are_not_known(comm: PlanningComm) -> None:
    memory, odd = torch.zeros(8, dtype=torch.complex64), bytearray(44)
    halves = [torch.frombuffer(odd, dtype=torch.complex64, count=2, offset=offset) for offset in (0, 20)]
    given = [torch.ones(2, dtype=torch.complex64) for _ in range(2)]
    for outputs, inputs in (
        (halves, given),
        (list(memory[:4].view(2, 2).t()), given),
        ([memory[:2].conj(), memory[2:4]], given),
        ([memory[:2], memory[1:3]], given),
        ([memory[:2], torch.nn.Parameter(memory[2:4])], given),
        ([memory[:2], memory[1:3]], [memory[4:6], memory[6:8]]),
        ([memory[:2], memory[2:4]], [memory[3:5], memory[6:8]]),
        ([memory[:2], memory[2:4], memory[4:6]], [*given, given[0]]),
        ([memory[:2], memory[2:4].view(torch.float32)], given),
        ([memory[:0], memory[:0]], [memory[:0], memory[:0]]),
    ):
        call = collectives_of(comm)["all_to_all"]  # type: ignore[arg-type]
        with suppress(MpicommError):
            call.run(outputs, inputs, (), ())
        assert call.find_plan(comm.cache, (outputs, inputs, (), ())) is None


def test_a_sum_with_factors_is_not_known(comm: Any) -> None:
    all_reduce, tensor = collectives_of(comm)["all_reduce"], torch.zeros(4)
    for op in (SUM, dist._make_nccl_premul_sum(2.0)):
        all_reduce.run(tensor, op, "tensor", None)
    assert all_reduce.find_plan(comm.cache, (tensor, SUM, "tensor", None))
    assert not all_reduce.find_plan(comm.cache, (tensor, dist._make_nccl_premul_sum(2.0), "tensor", None))


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str | None]:
    """Return a function that gives a tensor to `Streams.bucket`, and returns the text of the enqueued plan."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", torch._C.TensorBase.is_cpu, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(cuda_stream=9))
    monkeypatch.setattr(streams, "current_stream", lambda gpu: 7)
    monkeypatch.setattr(streams, "call_on", lambda stream, call, *given: call(*given))
    comm: Any = PlanningComm(0)
    comm.device, enqueued = 0, list[Any]()
    comm.cache.engine.enqueue = lambda plan, *_: enqueued.append(plan)
    comm._session.require_usable = lambda plan: None
    marks = SimpleNamespace(mark=lambda stream: None, wait_stream=lambda *_: None)
    comm._internals = SimpleNamespace(
        disable_votes=lambda: None, register_stream=lambda *_: marks, plan_cache=comm.cache
    )
    calls, ours = collectives_of(comm)["all_reduce"], streams.Streams(comm)
    ours.devices, ours._plans = [], comm.cache  # futures of this PyTorch may have no GPU

    def enqueue(tensor: torch.Tensor, op: Any = SUM) -> str | None:
        before, future = len(enqueued), ours.bucket(calls, tensor, op)
        assert len(enqueued) - before == (future is not None)
        assert future is None or future.value() is tensor
        return None if future is None else str(enqueued[-1].text)

    monkeypatch.setattr(enqueue, "comm", comm, raising=False)
    monkeypatch.setattr(enqueue, "make", lambda tensor: calls.run(tensor, SUM, "tensor", None), raising=False)
    return enqueue


def test_a_bucket_is_repeated_only_with_the_same_memory_operation_and_symmetric_arrays(bucket: Any) -> None:
    tensor = torch.zeros(12)
    assert bucket(tensor) is None
    bucket.make(tensor)
    assert [bucket(tensor) for _ in range(3)] == ["Allreduce"] * 3
    assert bucket(tensor, AVG) is None
    for changed in (
        tensor.view(torch.int32),
        tensor[1:],
        tensor.view(3, 4).t(),
        tensor.view(torch.complex64).conj(),
        torch._neg_view(tensor),
        tensor.detach().requires_grad_(),
    ):
        assert bucket(changed) is None
    assert bucket(tensor) == "Allreduce"
    bucket.comm._session.mappings.version += 1  # the symmetric arrays are others now
    assert bucket(tensor) is None
    bucket.make(tensor)
    assert bucket(tensor) == "Allreduce"


def test_each_bucket_of_a_known_form_is_filled_in(bucket: Any) -> None:
    bucket.comm.knows_forms = True
    first, second = torch.zeros(12), torch.zeros(8)
    bucket.make(torch.zeros(4))
    assert [bucket(tensor) for tensor in (first, second, first, second)] == ["a form"] * 4
    filled = [received[:2] for _, received in bucket.comm.form.filled]
    assert filled == [(tensor.data_ptr(), tensor.numel()) for tensor in (first, second, first, second)]
