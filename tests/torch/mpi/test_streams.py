"""Calls on tensors of a GPU follow streams, keep the memory of tensors that a program drops, and are part of graphs."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import mpicomm.torch
from mpicomm import CollectiveTimeoutError
from mpicomm.torch import communicator
from mpicomm.waiting import wait_until
from tests.helpers.inputs.torch_calls import FOR_LISTS, FUNCTIONS, Call, parts
from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same, while_the_last_rank_is_late
from tests.helpers.jobs.pace import HANG_S

pytestmark = pytest.mark.gpu_alone

COUNT = 1 << 18
BUSY_CYCLES = 50_000_000  # some tens of milliseconds, in which work that is not ordered comes too early


def keep_busy() -> None:
    """Keep the current stream busy."""
    torch.cuda._sleep(BUSY_CYCLES)


@pytest.mark.parametrize("async_op", [False, True])
def test_a_call_follows_the_work_of_the_current_stream(world: dist.ProcessGroup, async_op: bool) -> None:
    case = Case(world, async_op=async_op)
    given, got = case.own(COUNT), torch.zeros(COUNT)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        keep_busy()
        got.copy_(given)
        case.wait(dist.all_reduce(got, async_op=async_op))
        total = got.clone()
    stream.synchronize()
    require_same([total], [reduced(case.all(COUNT), Op.SUM)])


@pytest.mark.parametrize("by", ["wait", "block_current_stream", "future"])
def test_the_stream_that_waits_for_a_work_follows_the_call(world: dist.ProcessGroup, by: str) -> None:
    case = Case(world)
    tensor = case.own(COUNT)
    begun, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(begun):
        keep_busy()
        work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    with torch.cuda.stream(waiting):
        if by == "future":
            work.get_future().wait()
        else:
            getattr(work, by)()
        got = tensor.clone()
    assert not work.is_completed()  # the host did not wait
    waiting.synchronize()
    require_same([got], [reduced(case.all(COUNT), Op.SUM)])


def test_a_work_follows_the_stream_that_has_begun_the_call_also_if_one_rank_has_nothing_to_do(
    world: dist.ProcessGroup,
) -> None:
    alone, _ = dist.new_subgroups(1)
    tensor = torch.zeros(COUNT)
    for _ in range(2):
        dist.all_reduce(tensor, group=alone)
    dist.all_gather_into_tensor(torch.zeros(COUNT), tensor, group=alone)
    begun, waiting = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(begun):
        keep_busy()
        tensor.fill_(7)
        work = dist.all_reduce(tensor, group=alone, async_op=True)
    assert work is not None
    with torch.cuda.stream(waiting):
        work.wait()
        got = tensor.clone()
    waiting.synchronize()
    require_same([got], [torch.full((COUNT,), 7.0)])
    dist.destroy_process_group(alone)


def test_a_callback_of_a_future_follows_the_call(world: dist.ProcessGroup) -> None:
    case = Case(world)
    tensor = case.own(COUNT)
    torch.cuda.synchronize()
    keep_busy()
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda done: 2 * done.value()[0])
    require_same([doubled.wait()], [2 * reduced(case.all(COUNT), Op.SUM)])


@pytest.mark.mpi(min_size=2)
def test_the_stream_of_the_caller_goes_on_meanwhile(world: dist.ProcessGroup) -> None:
    case = Case(world)
    dist.all_reduce(case.own(COUNT))
    tensor = case.own(COUNT)
    torch.cuda.synchronize()
    with while_the_last_rank_is_late() as on_time:
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        if on_time:
            torch.cuda.current_stream().synchronize()
            assert not work.is_completed()
    work.wait()
    require_same([tensor], [reduced(case.all(COUNT), Op.SUM)])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("waits", ["nowhere", "elsewhere", "by the future"])
def test_the_memory_of_a_tensor_that_the_program_drops_waits_for_the_call(world: dist.ProcessGroup, waits: str) -> None:
    case = Case(world)
    dist.all_reduce(case.own(COUNT))
    torch.cuda.synchronize()
    other = torch.cuda.Stream()
    with while_the_last_rank_is_late():
        work = dist.all_reduce(torch.ones(COUNT), async_op=True)
        assert work is not None
        with torch.cuda.stream(other):
            if waits == "elsewhere":
                work.wait()
            elif waits == "by the future":
                work.get_future().wait()
        del work  # neither the tensor nor the work is kept
        after = torch.full((COUNT,), 7.0)
    torch.cuda.synchronize()
    assert (after == 7).all()


def test_calls_of_the_host_and_of_a_gpu_follow_each_other(world: dist.ProcessGroup) -> None:
    case = Case(world)
    on_host = [case.of(case.rank, 100_000, salt=salt) for salt in range(4)]
    on_gpu = [case.own(1000, salt=salt) for salt in range(4)]
    works = []
    for host, gpu in zip(on_host, on_gpu, strict=True):
        works += [dist.all_reduce(host, async_op=True), dist.all_reduce(gpu, async_op=True)]
    for work in works:
        assert work is not None
        work.wait()
    require_same(on_host, [reduced(case.all(100_000, salt=salt), Op.SUM) for salt in range(4)])
    require_same(on_gpu, [reduced(case.all(1000, salt=salt), Op.SUM) for salt in range(4)])


@pytest.mark.parametrize("async_op", [False, True])
def test_a_barrier_waits_for_the_work_of_the_current_stream(world: dist.ProcessGroup, async_op: bool) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        keep_busy()
        work = dist.barrier(async_op=async_op)
        if work is not None:
            work.wait()
    assert stream.query()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_does_not_come_makes_an_error(world: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=2))
    rank, culprit = dist.get_rank(), dist.get_world_size() - 1
    dist.all_reduce(torch.ones(4), group=group, async_op=True).wait()
    dist.barrier(group)
    if rank != culprit:
        work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
        assert work is not None and work.exception() is None
        assert wait_until(work.is_completed, HANG_S)
        error = work.exception()
        assert isinstance(error, CollectiveTimeoutError) and isinstance(error, RuntimeError)
        assert culprit in error.ranks and not work.is_success()
        with pytest.raises(RuntimeError, match=rf"rank {culprit} did not come"):
            work.wait()
        with pytest.raises(RuntimeError, match=rf"all_reduce: .*rank {culprit} did not come"):
            dist.all_reduce(torch.ones(4), group=group)
        with pytest.raises(CollectiveTimeoutError):
            communicator(group).check()
    dist.destroy_process_group(group)
    dist.barrier()


def test_an_error_of_a_call_is_raised_at_once(world: dist.ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"op=AVG is not defined for torch\.bool"):
        dist.all_reduce(torch.ones(3) > 0, Op.AVG, async_op=True)
    dist.barrier()


ELEMENTS = 1000
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


IN_GRAPHS = (
    *("all_reduce", "broadcast", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "all_to_all_single"),
    "multiples",
)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("name", IN_GRAPHS)
def test_a_graph_of_a_call(world: dist.ProcessGroup, name: str, async_op: bool) -> None:
    function = next(each for each in FUNCTIONS if each.name == (name if name != "multiples" else "all_reduce"))
    op = dist._make_nccl_premul_sum(0.5) if name == "multiples" else Op.SUM
    layouts = (FOR_LISTS.index(parts), 0)
    call = Call(world, async_op=async_op, function=function, op=op, base=ELEMENTS, columns=1, layouts=layouts)
    graph = captured(lambda: call.wait(call.begin()))
    for salt in range(1, REPLAYS):
        call.fill(salt)
        graph.replay()
        call.check(salt)
    del graph
    call.fill(REPLAYS)  # calls outside of graphs go on
    call.wait(call.begin())
    call.check(REPLAYS)


def test_a_graph_of_functional_collectives(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given, output = case.own(ELEMENTS), torch.zeros(ELEMENTS * case.size)

    def run() -> None:
        total = functional.wait_tensor(functional.all_reduce(given, "sum", world))
        output.copy_(functional.wait_tensor(functional.all_gather_tensor(total + case.rank, 0, world)))

    graph = captured(run)
    for salt in range(1, REPLAYS):
        given.copy_(case.own(ELEMENTS, salt=salt))
        graph.replay()
        total = reduced(case.all(ELEMENTS, salt=salt), Op.SUM)
        require_same([output], [torch.cat([total + rank for rank in range(case.size)])])


@pytest.mark.mpi(min_size=2)
def test_a_graph_of_messages(world: dist.ProcessGroup) -> None:
    case = Case(world)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    given, got = case.own(ELEMENTS), torch.zeros(ELEMENTS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        works = [dist.isend(given, after), dist.irecv(got, before)]
        for work in works:
            assert work is not None
            work.wait()
    for salt in range(1, REPLAYS):
        given.copy_(case.own(ELEMENTS, salt=salt))
        graph.replay()
        require_same([got], [case.of(before, ELEMENTS, salt=salt)])


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
