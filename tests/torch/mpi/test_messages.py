"""Messages, objects and functional collectives give the results of gloo."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from mpicomm.waiting import wait_until
from tests.helpers.inputs.torch_cases import MOVABLE, Case, Op, reduced, require_same

LARGE = 300_000  # elements: MPI receives so many only after it has met the receiver


@pytest.fixture(params=["mpicomm", "gloo"])
def group(request: pytest.FixtureRequest, world: dist.ProcessGroup, gloo: dist.ProcessGroup) -> dist.ProcessGroup:
    return world if request.param == "mpicomm" else gloo


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("count", [0, 5, LARGE])
def test_blocking_messages_around_a_ring(group: dist.ProcessGroup, count: int) -> None:
    case = Case(group)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    got = case.empty(count)
    if case.rank == 0:
        dist.send(case.own(count), group_dst=after, group=group)
        assert dist.recv(got, group_src=before, group=group) == before
    else:
        assert dist.recv(got, group_src=before, group=group) == before
        dist.send(case.own(count), group_dst=after, group=group)
    require_same([got], [case.of(before, count)])


@pytest.mark.mpi(min_size=2)
def test_messages_of_every_type_in_a_batch(world: dist.ProcessGroup) -> None:
    for dtype in MOVABLE:
        require_batch_works(Case(world, dtype))


def require_batch_works(case: Case) -> None:
    peers = [peer for peer in range(case.size) if peer != case.rank]
    got = {peer: case.empty(3, 4) for peer in peers}
    sends = [dist.P2POp(dist.isend, case.own(3, 4, salt=peer), group_peer=peer) for peer in peers]
    receives = [dist.P2POp(dist.irecv, got[peer], group_peer=peer) for peer in peers]
    works = dist.batch_isend_irecv([*sends, *receives])
    for work in works:
        work.wait()
    assert all(work.is_completed() for work in works)
    require_same(list(got.values()), [case.of(peer, 3, 4, salt=case.rank) for peer in peers])


@pytest.mark.mpi(min_size=2)
def test_messages_are_matched_by_tag(group: dist.ProcessGroup) -> None:
    case = Case(group)
    after, before = (case.rank + 1) % case.size, (case.rank - 1) % case.size
    sent = [dist.isend(case.own(4, salt=tag), group_dst=after, tag=tag, group=group) for tag in (1, 2)]
    got = {tag: case.empty(4) for tag in (2, 1)}
    for tag, tensor in got.items():
        work = dist.irecv(tensor, group_src=before, tag=tag, group=group)
        assert work is not None
        work.wait()
    for work in sent:
        assert work is not None
        work.wait()
    require_same(list(got.values()), [case.of(before, 4, salt=tag) for tag in (2, 1)])


@pytest.mark.mpi(min_size=2)
def test_a_work_of_a_receive_says_its_source(world: dist.ProcessGroup) -> None:
    case = Case(world)
    if case.rank:
        dist.send(case.own(1), group_dst=0)
        return
    works = [dist.irecv(case.empty(1)) for _ in range(case.size - 1)]
    for work in works:
        assert work is not None
        work.wait()
    assert sorted(work._source_rank() for work in works if work) == list(range(1, case.size))


def test_functional_collectives(group: dist.ProcessGroup) -> None:
    case = Case(group)
    given = case.own(2 * case.size, 3)
    everyone = case.all(2 * case.size, 3)
    total = reduced(everyone, Op.SUM)
    got = [
        functional.all_reduce(given, "sum", group),
        functional.all_reduce(given, "max", group),
        functional.broadcast(given, 0, group),
        functional.all_gather_tensor(given, 0, group),
        functional.all_gather_tensor(given, 1, group),
        functional.reduce_scatter_tensor(given, "sum", 0, group),
        functional.all_to_all_single(given, None, None, group),
        *functional.all_reduce_coalesced([given, given + 1], "sum", group),
    ]
    expected = [
        total,
        reduced(everyone, Op.MAX),
        everyone[0],
        torch.cat(everyone),
        torch.cat(everyone, 1),
        total.chunk(case.size)[case.rank],
        torch.cat([each.chunk(case.size)[case.rank] for each in everyone]),
        total,
        total + case.size,
    ]
    require_same([functional.wait_tensor(each) for each in got], expected)
    require_same([given], [everyone[case.rank]])


def test_functional_collectives_that_gloo_lacks(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given = case.own(2 * case.size, 3)
    everyone = case.all(2 * case.size, 3)
    total = reduced(everyone, Op.SUM)
    splits = [(case.rank + peer) % 3 for peer in range(case.size)]  # the tensors that a rank sends and receives
    uneven = case.own(sum(splits))
    cut = [case.of(rank, sum((rank + peer) % 3 for peer in range(case.size))) for rank in range(case.size)]
    parts = [each.split([(rank + peer) % 3 for peer in range(case.size)]) for rank, each in enumerate(cut)]
    got = [
        functional.all_reduce(given, "avg", world),
        functional.all_to_all_single(uneven, splits, splits, world),
        *functional.all_gather_into_tensor_coalesced([given, given + 1], world),
        *functional.reduce_scatter_tensor_coalesced([given, given + 1], "sum", [0, 0], world),
    ]
    gathered = torch.cat(everyone)
    expected = [
        total / case.size,
        torch.cat([each[case.rank] for each in parts]),
        gathered,
        gathered + 1,
        total.chunk(case.size)[case.rank],
        total.chunk(case.size)[case.rank] + case.size,
    ]
    require_same([functional.wait_tensor(each) for each in got], expected)


def test_functional_permutation(world: dist.ProcessGroup) -> None:
    case = Case(world)
    after = [(rank + 1) % case.size for rank in range(case.size)]
    got = functional.permute_tensor(case.own(4), after, world)
    require_same([functional.wait_tensor(got)], [case.of((case.rank - 1) % case.size, 4)])


def test_functional_collectives_pass_gradients(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given = case.own(4).requires_grad_()
    total = functional.all_gather_tensor_autograd(given, 0, world)
    (total * (1 + case.rank)).sum().backward()
    require_same([given.grad], [torch.full((4,), float(sum(range(1, case.size + 1))))])


@pytest.mark.mpi(min_size=2)
def test_a_message_moves_while_the_receiver_waits_elsewhere(group: dist.ProcessGroup) -> None:
    case = Case(group)
    got = case.empty(LARGE)
    work = dist.irecv(got, group_src=1, group=group) if case.rank == 0 else None
    if case.rank == 1:
        send_large(case)
    group.monitored_barrier(timedelta(seconds=5))
    if work is not None:
        work.wait()
        require_same([got], [case.of(1, LARGE)])


@pytest.mark.mpi(min_size=2)
def test_a_message_whose_work_the_program_drops_moves(world: dist.ProcessGroup) -> None:
    case = Case(world)
    got = case.empty(LARGE)
    if case.rank == 0:
        dist.irecv(got, group_src=1)
        gc.collect()
    if case.rank == 1:
        send_large(case)
    world.monitored_barrier(timedelta(seconds=5))
    if case.rank == 0 and case.device.type == "cpu":
        assert wait_until(lambda: torch.equal(got, case.of(1, LARGE)), 5)


def send_large(case: Case) -> None:
    sent = dist.isend(case.own(LARGE), group_dst=0, group=case.group)
    assert sent is not None
    sent.wait()


@pytest.mark.mpi(min_size=2)
def test_the_future_of_messages_ends_with_the_timeout_of_the_group(world: dist.ProcessGroup) -> None:
    group = dist.new_group(timeout=timedelta(seconds=1))
    case = Case(group)
    if case.rank == 0:
        with _coalescing_manager(group=group, device=case.device, async_ops=True) as manager:
            for _ in range(2):
                dist.irecv(case.empty(3), group_src=1, group=group)
        future = manager.works[0].get_future()
        ended = threading.Event()
        future.add_done_callback(lambda _: ended.set())
        assert ended.wait(1.8)
        with pytest.raises(RuntimeError, match="recv from rank 1 has not ended within 1 s"):
            future.wait()
    dist.barrier()
    if case.rank == 1:
        for _ in range(2):
            dist.send(case.own(3), group_dst=0, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
