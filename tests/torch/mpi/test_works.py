"""Works and futures of asynchronous calls: their completion, values and errors, and the order of callbacks."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C import _distributed_c10d as c10d

from mpicomm import CollectiveTimeoutError, InvalidUsageError
from mpicomm.torch.call_queue import CallQueue, HostWork
from tests.helpers.inputs.torch_cases import Case, Op, finish, reduced, require_same, while_the_last_rank_is_late
from tests.helpers.jobs.pace import HANG_S


def begin(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> dist.Work:
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert work is not None
    return work


@pytest.mark.mpi(min_size=2)
def test_a_work_is_complete_when_the_last_rank_has_come(world: dist.ProcessGroup) -> None:
    case = Case(world)
    begin(case.own(4)).wait()  # on a GPU all ranks set up memory at the first call
    tensor = case.own(4)
    with while_the_last_rank_is_late() as on_time:
        work = begin(tensor)
        future = work.get_future()
        if on_time:
            time.sleep(0.05)
            assert not work.is_completed()
            assert future.done() == (case.device.type == "cuda")  # there streams wait for the value, and not the host
            assert work.exception() is None
            with pytest.raises(CollectiveTimeoutError, match=r"all_reduce has not ended within 0\.02 s"):
                work.wait(timedelta(seconds=0.02))
    assert work.wait()
    finish(case)
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert future.wait()[0] is tensor and future.done()
    require_same(work.result(), [reduced(case.all(4), Op.SUM)])


def test_a_future_of_a_coalesced_gathering_has_a_list_of_each_rank(world: dist.ProcessGroup) -> None:
    case = Case(world)
    outputs = [[case.empty(4), case.empty(2)] for _ in range(case.size)]
    future = dist.all_gather_coalesced(outputs, [case.own(4), case.own(2)], async_op=True)
    assert future is not None
    for got, four, two in zip(torch.futures.wait_all([future])[0], case.all(4), case.all(2), strict=True):
        require_same(got, [four, two])


def test_a_thread_coalesces_only_its_own_calls(world: dist.ProcessGroup) -> None:
    case = Case(world)
    mine, others = case.own(4), case.own(2)
    world._start_coalescing(mine.device)
    begin(mine)
    other = threading.Thread(target=lambda: begin(others).wait())
    other.start()
    other.join(HANG_S)
    joined = world._end_coalescing(mine.device)
    joined.wait()
    require_same(joined.result(), [reduced(case.all(4), Op.SUM)])
    require_same([others], [reduced(case.all(2), Op.SUM)])
    begin(mine).wait()
    assert not world._end_coalescing(mine.device).result()  # it joins no call of before or after


@pytest.mark.mpi(min_size=2)
def test_futures_of_messages(world: dist.ProcessGroup) -> None:
    case = Case(world)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    got = case.empty(4)
    receive, send = dist.irecv(got, before), dist.isend(case.own(4), after)
    assert receive is not None and send is not None
    doubled = receive.get_future().then(lambda done: done.value()[0] * 2)
    require_same([doubled.wait()], [case.of(before, 4) * 2])
    send.wait()
    assert receive.is_completed() and send.get_future().done()


@pytest.mark.host_alone  # on a GPU the call itself raises
def test_an_error_of_an_asynchronous_call_is_raised_by_its_work_and_its_future(world: dist.ProcessGroup) -> None:
    work = dist.all_reduce(torch.ones(3) > 0, Op.AVG, async_op=True)
    assert work is not None
    future = work.get_future()
    with pytest.raises(InvalidUsageError, match=r"op=AVG is not defined for torch\.bool"):
        work.wait()
    assert isinstance(work.exception(), InvalidUsageError)
    assert work.is_completed() and not work.is_success()
    boxed = work.boxed()
    del work
    gc.collect()
    for kept in (future, c10d.Work.unbox(boxed).get_future()):
        with pytest.raises(RuntimeError, match=r"op=AVG is not defined for torch\.bool"):
            kept.wait()
    dist.barrier()


def test_calls_go_on_in_their_order_whether_they_block_or_not(world: dist.ProcessGroup) -> None:
    case = Case(world, torch.int64)
    tensors = [case.own(3, salt=index) for index in range(20)]
    works = []
    for index, tensor in enumerate(tensors):
        if index % 3 == 2:
            dist.all_reduce(tensor)
        else:
            works.append(begin(tensor))
    for work in reversed(works):
        work.wait()
    require_same(tensors, [reduced(case.all(3, salt=index), Op.SUM) for index in range(20)])


@pytest.fixture
def _switching() -> Iterator[None]:
    """Python switches between threads as often as it can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.host_alone
@pytest.mark.usefixtures("_switching")
def test_threads_get_the_same_future(world: dist.ProcessGroup) -> None:
    def ask(work: HostWork, both: threading.Barrier) -> torch.futures.Future[list[torch.Tensor]]:
        both.wait()
        return work.get_future()

    with ThreadPoolExecutor(2) as threads:
        for _ in range(200):
            work = HostWork(CallQueue("queue"), lambda: None, [], "call")
            futures = [*threads.map(ask, [work] * 2, [threading.Barrier(2)] * 2)]
            work.run()
            assert all(future.done() for future in futures)


@pytest.mark.host_alone
@pytest.mark.usefixtures("_switching")
def test_the_future_of_a_work_that_is_over_is_complete(world: dist.ProcessGroup) -> None:
    queue = CallQueue("queue")
    for _ in range(1000):
        work = queue.submit(lambda: None, [], "call")
        work.wait()
        assert work.get_future().done()
    assert queue.close(HANG_S)


@pytest.mark.host_alone  # on a GPU ranks that begin calls in different orders may wait for each other, as with NCCL
def test_ranks_may_begin_calls_of_two_groups_in_different_orders(world: dist.ProcessGroup) -> None:
    other = dist.new_group()
    case = Case(world)
    for count in (4, 100_000):
        tensors = [case.own(count, salt=salt) for salt in range(2)]
        calls = [(tensors[0], world), (tensors[1], other)]
        works = [begin(tensor, group) for tensor, group in (calls if case.rank % 2 else reversed(calls))]
        for work in works:
            work.wait()
        require_same(tensors, [reduced(case.all(count, salt=salt), Op.SUM) for salt in range(2)])
    dist.destroy_process_group(other)


def test_a_work_keeps_no_inputs_and_a_future_no_outputs_after_its_end(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given, output = case.own(100), case.own(100)
    seen = weakref.ref(given), weakref.ref(output)
    work = dist.all_gather([case.empty(100) for _ in range(case.size)], given, async_op=True)
    assert work is not None
    work.wait()
    begin(output).get_future().wait()
    begin(case.own(1)).wait()  # the thread has left the first calls
    del given, output
    gc.collect()
    assert [each() for each in seen] == [None, None]
    finish(case)
    assert work.is_completed()


def test_a_tensor_that_the_program_drops_lives_until_the_call_ends(world: dist.ProcessGroup) -> None:
    case = Case(world)
    works = [begin(case.own(50_000, salt=salt)) for salt in range(4)]
    gc.collect()
    for salt, work in enumerate(works):
        work.wait()
        require_same(work.result(), [reduced(case.all(50_000, salt=salt), Op.SUM)])


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


@pytest.mark.host_alone
def test_the_tensors_in_the_value_of_a_future_are_found_whatever_it_is() -> None:
    look: Any = torch._jit_internal._extract_tensors
    one, two = torch.ones(1), nn.Parameter(torch.ones(2))
    for value in (one, two, [one, one], [one, two], [], (one, [two]), [one, {"other": two}], None, "no tensor"):
        assert [id(each) for each in look(value)] == [id(each) for each in look.__wrapped__(value)]


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
