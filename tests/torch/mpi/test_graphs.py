"""CUDA graphs of PyTorch hold calls: each replay carries them out again, on the tensors' new content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpicomm.torch
from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same

pytestmark = pytest.mark.gpu_alone

COUNT = 1000
REPLAYS = 4
WIDTH = 16


def captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of ``call``, which runs before the capture, as PyTorch recommends."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


@dataclass
class Captured:
    """A call between fixed tensors, and the right results of the ranks' data."""

    name: str
    rows: int
    """The rows of the output for each row of the input; a negative number divides."""
    call: Callable[[torch.Tensor, torch.Tensor, bool], object]
    expected: Callable[[list[torch.Tensor], Case], torch.Tensor]


def _summed(output: torch.Tensor, given: torch.Tensor, async_op: bool) -> object:
    output.copy_(given)
    return dist.all_reduce(output, async_op=async_op)


def _sent(output: torch.Tensor, given: torch.Tensor, async_op: bool) -> object:
    output.copy_(given)
    return dist.broadcast(output, 0, async_op=async_op)


def _multiplied(output: torch.Tensor, given: torch.Tensor, async_op: bool) -> object:
    output.copy_(given)
    op = torch.distributed._make_nccl_premul_sum(0.5)
    return dist.all_reduce(output, op, async_op=async_op)


CALLS = [
    Captured("all_reduce", 1, _summed, lambda given, case: reduced(given, Op.SUM)),
    Captured("multiples", 1, _multiplied, lambda given, case: reduced(given, Op.SUM) / 2),
    Captured("broadcast", 1, _sent, lambda given, case: given[0]),
    Captured(
        "all_gather_into_tensor",
        0,
        lambda output, given, async_op: dist.all_gather_into_tensor(output, given, async_op=async_op),
        lambda given, case: torch.cat(given),
    ),
    Captured(
        "all_gather",
        0,
        lambda output, given, async_op: dist.all_gather(
            list(output.chunk(dist.get_world_size())), given, async_op=async_op
        ),
        lambda given, case: torch.cat(given),
    ),
    Captured(
        "reduce_scatter_tensor",
        -1,
        lambda output, given, async_op: dist.reduce_scatter_tensor(output, given, async_op=async_op),
        lambda given, case: reduced(given, Op.SUM).chunk(case.size)[case.rank],
    ),
    Captured(
        "all_to_all_single",
        1,
        lambda output, given, async_op: dist.all_to_all_single(output, given, async_op=async_op),
        lambda given, case: torch.cat([each.chunk(case.size)[case.rank] for each in given]),
    ),
]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_a_graph_of_a_call(world: dist.ProcessGroup, call: Captured, async_op: bool) -> None:
    case = Case(world)
    count = COUNT * case.size
    given = case.own(count)
    output = torch.zeros({1: count, 0: count * case.size, -1: COUNT}[call.rows])

    def run() -> None:
        work = call.call(output, given, async_op)
        if isinstance(work, dist.Work):
            work.wait()

    graph = captured(run)
    for salt in range(1, REPLAYS):
        given.copy_(case.own(count, salt=salt))
        output.zero_()
        graph.replay()
        require_same([output], [call.expected(case.all(count, salt=salt), case)])
    del graph
    dist.all_reduce(given)  # calls outside of graphs go on
    require_same([given], [reduced(case.all(count, salt=REPLAYS - 1), Op.SUM)])


def test_a_graph_of_functional_collectives(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given, output = case.own(COUNT), torch.zeros(COUNT * case.size)

    def run() -> None:
        total = functional.wait_tensor(functional.all_reduce(given, "sum", world))
        output.copy_(functional.wait_tensor(functional.all_gather_tensor(total + case.rank, 0, world)))

    graph = captured(run)
    for salt in range(1, REPLAYS):
        given.copy_(case.own(COUNT, salt=salt))
        graph.replay()
        total = reduced(case.all(COUNT, salt=salt), Op.SUM)
        require_same([output], [torch.cat([total + rank for rank in range(case.size)])])


@pytest.mark.mpi(min_size=2)
def test_a_graph_of_messages(world: dist.ProcessGroup) -> None:
    case = Case(world)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    given, got = case.own(COUNT), torch.zeros(COUNT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        works = [dist.isend(given, after), dist.irecv(got, before)]
        for work in works:
            assert work is not None
            work.wait()
    for salt in range(1, REPLAYS):
        given.copy_(case.own(COUNT, salt=salt))
        graph.replay()
        require_same([got], [case.of(before, COUNT, salt=salt)])


def layers() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def test_a_graph_of_layers_that_are_spread_over_ranks(world: dist.ProcessGroup) -> None:
    case = Case(world)
    mesh = init_device_mesh("cuda", (case.size,))
    spread = parallelize_module(layers(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    whole, inputs, outputs = layers(), torch.zeros(8, WIDTH), torch.zeros(8, WIDTH)
    with torch.no_grad():
        graph = captured(lambda: outputs.copy_(spread(inputs)))
        for salt in range(1, REPLAYS):
            inputs.copy_(case.of(0, 8, WIDTH, salt=salt))
            graph.replay()
            torch.testing.assert_close(outputs, whole(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hook", [False, True])
def test_a_graph_of_a_step_of_data_parallel_training(world: dist.ProcessGroup, hook: bool) -> None:
    """As PyTorch's notes on CUDA graphs have it: on a side stream, 11 steps before the capture."""
    case = Case(world)
    inputs = torch.zeros(8, WIDTH)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model = DistributedDataParallel(layers())
        if hook:
            model.register_comm_hook(None, mpicomm.torch.allreduce_hook)
        for _ in range(11):
            model.zero_grad(set_to_none=True)
            model(inputs).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    model.zero_grad(set_to_none=True)
    with torch.cuda.graph(graph, stream=stream):
        model(inputs).square().mean().backward()
    inputs.copy_(case.own(8, WIDTH, salt=5))
    graph.replay()
    alone = layers()
    torch.stack(
        [alone(each.to(inputs.device)).square().mean() for each in case.all(8, WIDTH, salt=5)]
    ).mean().backward()
    for mine, right in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=1e-4, atol=1e-5)
