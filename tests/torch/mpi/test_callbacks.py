"""Callbacks of futures: their arguments, and the order of their calls among the calls of the program."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same, while_the_last_rank_is_late
from tests.helpers.jobs.pace import HANG_S


def begin(tensor: torch.Tensor) -> dist.Work:
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    return work


def test_a_callback_may_make_calls(world: dist.ProcessGroup) -> None:
    """As PyTorch's hook for gradients does that sends them in few dimensions."""
    case = Case(world)
    first, second, third = (case.own(4, salt=salt) for salt in range(3))

    def call_again(done: torch.futures.Future[list[torch.Tensor]]) -> list[torch.Tensor]:
        dist.all_reduce(second)
        more: list[torch.Tensor] = begin(third).get_future().wait()
        return [*done.value(), second, *more]

    future = begin(first).get_future().then(call_again)
    require_same(future.wait(), [reduced(case.all(4, salt=salt), Op.SUM) for salt in range(3)])


def test_callbacks_follow_one_another(world: dist.ProcessGroup) -> None:
    case = Case(world)
    future = begin(case.own(4)).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2).then(lambda done: done.value() + 1)
    require_same([doubled.wait()], [reduced(case.all(4), Op.SUM) * 2 + 1])
    late = future.then(lambda done: done.value()[0] * 3)  # of a future that is done
    require_same([late.wait()], [reduced(case.all(4), Op.SUM) * 3])


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_alone  # on a GPU the future is complete at once, and its callbacks run in the program's thread
def test_the_calls_of_a_callback_come_before_the_next_call_of_the_program(world: dist.ProcessGroup) -> None:
    case = Case(world)
    tensors = [case.own(3, salt=salt) for salt in range(3)]

    def go_on(_: torch.futures.Future[list[torch.Tensor]]) -> None:
        time.sleep(0.1 * (case.rank > 0))  # so that on other ranks the program comes to its call in between
        dist.all_reduce(tensors[1])

    work = begin(tensors[0])
    future = work.get_future().then(go_on)
    work.wait()
    time.sleep(0.03 * (case.rank == 0))
    dist.all_reduce(tensors[2])
    future.wait()
    require_same(tensors, [reduced(case.all(3, salt=salt), Op.SUM) for salt in range(3)])


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_alone
def test_a_callback_may_wait_for_a_later_call(world: dist.ProcessGroup) -> None:
    case = Case(world)
    first, second, third = (case.own(3, salt=salt) for salt in range(3))
    works: list[dist.Work] = []

    def wait_for_later(_: object) -> list[torch.Tensor]:
        works[1].wait(timedelta(seconds=HANG_S))
        return [second.clone(), *works[2].get_future().wait()]

    with while_the_last_rank_is_late() as on_time:
        works.append(begin(first))
        if on_time:  # the call is under way, so the thread of the calls runs the callback
            future = works[0].get_future().then(wait_for_later)
        works += [begin(second), begin(third)]
    if not on_time:
        future = works[0].get_future().then(wait_for_later)
    require_same(future.wait(), [reduced(case.all(3, salt=salt), Op.SUM) for salt in (1, 2)])
