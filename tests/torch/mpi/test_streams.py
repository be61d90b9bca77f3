"""Calls on tensors of a GPU follow the streams of the program, and keep the memory of tensors that it drops."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpicomm import CollectiveTimeoutError
from mpicomm.torch import communicator
from mpicomm.waiting import wait_until
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
