"""Messages and functional collectives, also compiled."""

from __future__ import annotations

import gc
import threading
from datetime import timedelta
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

from mpicomm.waiting import wait_until
from tests.helpers.inputs.torch_cases import MOVABLE, Case, Op, reduced, require_same
from tests.helpers.jobs.pace import HANG_S

LARGE = 300_000  # elements: MPI receives so many only after it has met the receiver


@pytest.mark.mpi(min_size=2)
def test_messages_of_every_type_and_size_in_a_batch(world: dist.ProcessGroup) -> None:
    for dtype, shape in [*((dtype, (3, 4)) for dtype in MOVABLE), (torch.float32, (0,)), (torch.float32, (LARGE,))]:
        case = Case(world, dtype)
        peers = [peer for peer in range(case.size) if peer != case.rank]
        got = {peer: case.empty(*shape) for peer in peers}
        sends = [dist.P2POp(dist.isend, case.own(*shape, salt=peer), group_peer=peer) for peer in peers]
        receives = [dist.P2POp(dist.irecv, got[peer], group_peer=peer) for peer in peers]
        works = dist.batch_isend_irecv([*sends, *receives])
        for work in works:
            work.wait()
        assert all(work.is_completed() for work in works)
        require_same(list(got.values()), [case.of(peer, *shape, salt=case.rank) for peer in peers])


def test_functional_collectives(world: dist.ProcessGroup) -> None:
    case = Case(world)
    given = case.own(2 * case.size, 3)
    everyone = case.all(2 * case.size, 3)
    total, gathered = reduced(everyone, Op.SUM), torch.cat(everyone)

    def splits(rank: int) -> list[int]:  # the tensors that a rank sends and receives
        return [(rank + peer) % 3 for peer in range(case.size)]

    mine = splits(case.rank)
    uneven = [case.of(rank, sum(splits(rank))).split(splits(rank)) for rank in range(case.size)]
    part = total.chunk(case.size)[case.rank]
    calls = [
        (functional.all_reduce(given, "sum", world), total),
        (functional.all_reduce(given, "max", world), reduced(everyone, Op.MAX)),
        (functional.all_reduce(given, "avg", world), total / case.size),
        (functional.broadcast(given, 0, world), everyone[0]),
        (functional.all_gather_tensor(given, 0, world), gathered),
        (functional.all_gather_tensor(given, 1, world), torch.cat(everyone, 1)),
        (functional.reduce_scatter_tensor(given, "sum", 0, world), part),
        (
            functional.all_to_all_single(given, None, None, world),
            torch.cat([each.chunk(case.size)[case.rank] for each in everyone]),
        ),
        (
            functional.all_to_all_single(case.own(sum(mine)), mine, mine, world),
            torch.cat([each[case.rank] for each in uneven]),
        ),
    ]
    pairs = [given, given + 1]
    coalesced = [
        (functional.all_reduce_coalesced(pairs, "sum", world), [total, total + case.size]),
        (functional.all_gather_into_tensor_coalesced(pairs, world), [gathered, gathered + 1]),
        (functional.reduce_scatter_tensor_coalesced(pairs, "sum", [0, 0], world), [part, part + case.size]),
    ]
    for got, expected in [*calls, *(pair for each in coalesced for pair in zip(*each, strict=True))]:
        require_same([functional.wait_tensor(got)], [expected])
    require_same([given], [everyone[case.rank]])


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
@pytest.mark.parametrize("drops", [False, True])
def test_a_message_moves_while_the_receiver_waits_elsewhere(world: dist.ProcessGroup, drops: bool) -> None:
    """The receiver keeps the work, or drops it."""
    case = Case(world)
    got = case.empty(LARGE)
    work = dist.irecv(got, group_src=1) if case.rank == 0 else None
    if drops:
        work = None
        gc.collect()
    if case.rank == 1:
        sent = dist.isend(case.own(LARGE), group_dst=0, group=world)
        assert sent is not None
        sent.wait()
    world.monitored_barrier()
    if work is not None:
        work.wait()
        require_same([got], [case.of(1, LARGE)])
    elif case.rank == 0 and case.device.type == "cpu":
        assert wait_until(lambda: torch.equal(got, case.of(1, LARGE)), HANG_S)


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


def require_compiled(world: dist.ProcessGroup, backend: str) -> None:
    case = Case(world)
    name = world.group_name

    def calculate(given: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(2 * given, "sum", name)
        whole = functional.all_gather_tensor(total + 1, 0, name)
        return functional.reduce_scatter_tensor(whole - 1, "max", 0, name)

    compiled = torch.compile(calculate, backend=backend, fullgraph=True)
    for salt in range(3):
        expected = 2 * reduced(case.all(6, 5, salt=salt), Op.SUM)
        require_same([compiled(case.own(6, 5, salt=salt))], [expected])


def test_compiled_functional_collectives(world: dist.ProcessGroup) -> None:
    require_compiled(world, "aot_eager")


@pytest.mark.gpu_alone
@pytest.mark.skipif(not find_spec("triton"), reason="PyTorch compiles for GPUs with Triton")
def test_functional_collectives_beside_compiled_kernels(world: dist.ProcessGroup) -> None:
    require_compiled(world, "inductor")
