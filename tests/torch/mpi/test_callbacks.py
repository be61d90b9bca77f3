"""Callbacks of futures: their arguments, and the order of their calls among the calls of the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

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


def add_late(futures: Futures, reduce: Reduce) -> Futures:
    begun = [reduce(2), reduce(3)]
    return [futures[0].then(lambda _: reduce(4)), *begun]


def add_in_another_order(futures: Futures, reduce: Reduce) -> Futures:
    second = futures[1].then(lambda _: reduce(2))
    begun = reduce(3)
    return [futures[0].then(lambda _: reduce(4)), second, begun]


def add_to_a_callback(futures: Futures, reduce: Reduce) -> Futures:
    first = futures[0].then(lambda _: reduce(2))
    begun = reduce(3)
    return [first.then(lambda _: reduce(4)), begun]


def add_inside_a_callback(futures: Futures, reduce: Reduce) -> Futures:
    first = futures[0].then(lambda _: reduce(2).then(lambda _: reduce(3)))
    return [first, reduce(4)]


def add_to_joined_futures(futures: Futures, reduce: Reduce) -> Futures:
    with _coalescing_manager(async_ops=True) as manager:
        tensors = reduce.tensors[2:4]
        for tensor in tensors:
            dist.all_reduce(tensor)
    joined = manager.works[0].get_future()
    second = joined.then(lambda _: reduce(4))
    begun = reduce(5)
    return [futures[0].then(lambda _: reduce(6)), second, begun]


class Reduce:
    """Begins to reduce the tensor of a number, and returns the future."""

    def __init__(self, case: Case) -> None:
        self.tensors = [case.own(3, salt=salt) for salt in range(8)]
        self.begun: list[int] = []

    def __call__(self, number: int) -> torch.futures.Future[list[torch.Tensor]]:
        time.sleep(0.01)
        self.begun.append(number)
        return begin(self.tensors[number]).get_future()


Futures = list[torch.futures.Future[Any]]


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_alone
@pytest.mark.parametrize(
    "add", [add_late, add_in_another_order, add_to_a_callback, add_inside_a_callback, add_to_joined_futures]
)
def test_calls_of_a_callback_come_where_the_program_adds_it(
    world: dist.ProcessGroup, add: Callable[[Futures, Reduce], Futures]
) -> None:
    """The futures are complete when the last rank adds the callbacks, and not yet on the others."""
    case = Case(world)
    reduce = Reduce(case)
    with while_the_last_rank_is_late() as on_time:
        works = [begin(tensor) for tensor in reduce.tensors[:2]]
        if on_time:
            added = add([work.get_future() for work in works], reduce)
    if not on_time:
        for work in works:
            work.wait()
        added = add([work.get_future() for work in works], reduce)
    torch.futures.wait_all(added)
    dist.barrier()
    numbers = [0, 1, *reduce.begun, *((2, 3) if add is add_to_joined_futures else ())]
    expected = [reduced(case.all(3, salt=salt), Op.SUM) for salt in numbers]
    require_same([reduce.tensors[number] for number in numbers], expected)


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
