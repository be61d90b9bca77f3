"""Tensors of other shapes, layouts and origins, and operations that gloo lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import _make_nccl_premul_sum

from mpicomm.torch import communicator
from tests.helpers.inputs.torch_cases import FLOATS, Case, Op, reduced, require_same


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (70_001,)], ids=str)
def test_shapes(world: dist.ProcessGroup, shape: tuple[int, ...]) -> None:
    for async_op in (False, True):
        case = Case(world, async_op=async_op)
        summed, sent = case.own(*shape), case.own(*shape)
        gathered = [case.empty(*shape) for _ in range(case.size)]
        case.wait(dist.all_reduce(summed, async_op=async_op))
        case.wait(dist.broadcast(sent, 0, async_op=async_op))
        case.wait(dist.all_gather(gathered, case.own(*shape), async_op=async_op))
        everyone = case.all(*shape)
        require_same([summed, sent, *gathered], [reduced(everyone, Op.SUM), everyone[0], *everyone])
        if shape:
            rows = case.own(case.size * shape[0], *shape[1:])
            scattered = case.empty(*shape)
            case.wait(dist.reduce_scatter_tensor(scattered, rows, async_op=async_op))
            swapped = torch.empty_like(rows)
            case.wait(dist.all_to_all_single(swapped, rows, async_op=async_op))
            all_rows = case.all(case.size * shape[0], *shape[1:])
            parts = [each.tensor_split(case.size)[case.rank] for each in all_rows]
            require_same([scattered, swapped], [reduced(parts, Op.SUM), torch.cat(parts)])


def test_lists_of_tensors_in_any_order_of_memory(world: dist.ProcessGroup) -> None:
    """The outputs have another order of memory than the tensor that is sent, and gaps."""
    case = Case(world)
    outputs = [
        case.empty(6, 4).t(),
        case.empty(4, 12)[:, ::2],
        case.empty(4, 6),
        case.empty(5, 6)[1:],
    ][: case.size]
    dist.all_gather(outputs, case.own(4, 6))
    require_same(outputs, case.all(4, 6))
    got = case.empty(4, 6)
    given = [case.own(6, 4, salt=peer).t() for peer in range(case.size)]
    dist.reduce_scatter(got, given)
    require_same([got], [reduced(case.all(6, 4, salt=case.rank), Op.SUM).t()])


def test_lists_with_views_of_the_other_sign(world: dist.ProcessGroup) -> None:
    """They follow each other in memory, which holds the numbers with the other sign."""
    case = Case(world)
    memory = case.empty(case.size)
    outputs = [torch._neg_view(memory[rank : rank + 1]) for rank in range(case.size)]
    dist.all_gather(outputs, case.own(1))
    require_same([output.resolve_neg() for output in outputs], case.all(1))


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_that_share_memory(world: dist.ProcessGroup, async_op: bool) -> None:
    """The input is the part of the output that has the same contents, or another one."""
    case = Case(world, async_op=async_op)
    everyone = case.all(3)
    for place in (case.rank, 0):
        joined, listed = torch.zeros(case.size, 3), torch.zeros(case.size, 3)
        joined[place], listed[place] = case.own(3), case.own(3)
        case.wait(dist.all_gather_into_tensor(joined.view(-1), joined[place], async_op=async_op))
        case.wait(dist.all_gather(list(listed), listed[place], async_op=async_op))
        require_same([joined, listed], [torch.stack(everyone)] * 2)
        gathered = torch.zeros(case.size, 3)
        gathered[place] = case.own(3)
        outputs = list(gathered) if case.rank == 0 else None
        case.wait(dist.gather(gathered[place], outputs, 0, async_op=async_op))
        scattered = torch.stack([case.of(0, 3, salt=peer) for peer in range(case.size)]).to(case.device)
        given = list(scattered) if case.rank == 0 else None
        case.wait(dist.scatter(scattered[place], given, 0, async_op=async_op))
        require_same([scattered[place]], [case.of(0, 3, salt=case.rank)])
        if case.rank == 0:
            require_same([gathered], [torch.stack(everyone)])
        rows, more = case.own(case.size, 3), case.own(case.size, 3)
        case.wait(dist.reduce_scatter_tensor(rows[place], rows.view(-1), async_op=async_op))
        case.wait(dist.reduce_scatter(more[place], list(more), async_op=async_op))
        total = reduced(case.all(case.size, 3), Op.SUM)[case.rank]
        require_same([rows[place], more[place]], [total] * 2)
    swapped = case.own(case.size, 3)
    case.wait(dist.all_to_all_single(swapped, swapped, async_op=async_op))
    require_same([swapped], [torch.stack([each[case.rank] for each in case.all(case.size, 3)])])


@pytest.mark.parametrize("async_op", [False, True])
def test_calls_that_are_repeated_and_calls_of_other_sizes_in_turns(world: dist.ProcessGroup, async_op: bool) -> None:
    case = Case(world, async_op=async_op)
    rank, size = case.rank, case.size
    cases = []
    for rows in (5, 3, 8):
        parts = [[rows + sender * receiver for receiver in range(size)] for sender in range(size)]
        sent, received = parts[rank], [each[rank] for each in parts]
        tensors = [case.empty(*shape) for shape in ((rows,), (rows,), (size, rows), (size, rows), (rows,))]
        tensors += [case.empty(size, rows), case.empty(sum(received), 2)]
        cases.append((rows, parts, sent, received, tensors))
    for turn in range(11):
        for rows, parts, sent, received, tensors in cases:
            summed, shown, gathered, in_place, scattered, swapped, split = tensors
            summed.copy_(case.own(rows, salt=turn))
            shown.copy_(case.own(rows, salt=turn))
            in_place[rank] = case.own(rows, salt=turn)
            blocks = case.own(size, rows, salt=turn)
            case.wait(dist.all_reduce(summed, async_op=async_op))
            case.wait(dist.broadcast(shown, size - 1, async_op=async_op))
            case.wait(dist.all_gather_into_tensor(gathered, case.own(rows, salt=turn), async_op=async_op))
            case.wait(dist.all_gather_into_tensor(in_place, in_place[rank], async_op=async_op))
            case.wait(dist.reduce_scatter_tensor(scattered, blocks, async_op=async_op))
            case.wait(dist.all_to_all_single(swapped, blocks, async_op=async_op))
            given = case.own(sum(sent), 2, salt=turn)
            case.wait(dist.all_to_all_single(split, given, received, sent, async_op=async_op))
            everyone = case.all(rows, salt=turn)
            of_this_rank = [each[rank] for each in case.all(size, rows, salt=turn)]
            all_given = [case.of(sender, sum(part), 2, salt=turn).split(part) for sender, part in enumerate(parts)]
            require_same([summed, shown], [reduced(everyone, Op.SUM), everyone[-1]])
            require_same([gathered, in_place], [torch.stack(everyone)] * 2)
            require_same([scattered, swapped], [reduced(of_this_rank, Op.SUM), torch.stack(of_this_rank)])
            require_same([split], [torch.cat([each[rank] for each in all_given])])


def test_slices_without_elements(world: dist.ProcessGroup, device: torch.device) -> None:
    comm = communicator()
    empty = torch.zeros(4, 5, device=device)[:, :0]
    sent, received = torch.zeros(2, 4, 5, device=device)[:, :, :0]
    following, previous = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    none, types = [0] * comm.size, [MPI.FLOAT] * comm.size
    comm.Bcast(empty)
    comm.Allreduce(sent, received)
    comm.Allgather([sent, MPI.FLOAT], received)
    comm.Alltoallv([sent, none], [received, none])
    comm.Alltoallw([sent, none, none, types], [received, none, none, types])
    prepared = comm.Allgather_init(sent, received)
    prepared.Start()
    prepared.Wait()
    comm.Iallgather(sent, received).Wait()
    comm.Sendrecv(sent, following, 0, received, previous, 0)
    request = comm.Isend(sent, following)
    comm.Recv(received, previous)
    request.Wait()


def test_tensors_that_require_gradients(world: dist.ProcessGroup) -> None:
    case = Case(world)
    leaf = case.own(4).requires_grad_()
    dist.broadcast(leaf, 0)
    require_same([leaf], [case.of(0, 4)])
    with torch.no_grad():
        leaf.copy_(case.own(4))
    dist.all_reduce(leaf, async_op=True).wait()
    require_same([leaf], [reduced(case.all(4), Op.SUM)])
    outputs = [case.empty(4).requires_grad_() for _ in range(case.size)]
    dist.all_gather(outputs, case.own(4).requires_grad_())
    require_same(outputs, case.all(4))
    assert leaf.requires_grad and leaf.is_leaf and leaf.grad_fn is None


def test_autograd_may_want_a_gradient_of_an_output_while_its_call_is_under_way(world: dist.ProcessGroup) -> None:
    """As after a functional collective has begun."""
    case = Case(world, async_op=True)
    given, sent = case.own(4), case.own(4 * case.size)
    outputs = [case.empty(4 * case.size), case.own(4), case.empty(4), case.empty(4 * case.size), case.own(4)]
    gathered, summed, scattered, swapped, shown = outputs
    works = [
        dist.all_gather_into_tensor(gathered, given, async_op=True),
        dist.all_reduce(summed, async_op=True),
        dist.reduce_scatter_tensor(scattered, sent, async_op=True),
        dist.all_to_all_single(swapped, sent, async_op=True),
        dist.broadcast(shown, 0, async_op=True),
    ]
    for output in outputs:
        output.requires_grad_()
    for work in works:
        case.wait(work)
    everyone, rows = case.all(4), [each.chunk(case.size)[case.rank] for each in case.all(4 * case.size)]
    expected = [torch.cat(everyone), reduced(everyone, Op.SUM), reduced(rows, Op.SUM), torch.cat(rows), everyone[0]]
    require_same(outputs, expected)


@pytest.mark.parametrize("factor", [0.5, [0.5]], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_of_multiples(world: dist.ProcessGroup, dtype: torch.dtype, factor: Any) -> None:
    case = Case(world, dtype)
    op = _make_nccl_premul_sum(factor if isinstance(factor, float) else torch.tensor(factor))
    expected = reduced(case.all(4), Op.SUM) / 2
    given = case.own(4)
    dist.all_reduce(given, op)
    at_root = case.own(4)
    dist.reduce(at_root, 0, op)
    scattered = case.empty(4)
    rows = case.own(4).repeat(case.size)
    dist.reduce_scatter_tensor(scattered, rows, op)
    listed = case.empty(4)
    dist.reduce_scatter(listed, [case.own(4)] * case.size, op, async_op=True).wait()
    require_same([given, scattered, listed], [expected] * 3)
    require_same([rows], [case.own(4).repeat(case.size)])  # tensors that are only sent stay
    require_same([at_root], [expected if case.rank == 0 else case.own(4)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [10, 200_000])
def test_sums_that_round_are_near_gloos_and_the_same_on_all_ranks(
    world: dist.ProcessGroup, gloo: dist.ProcessGroup, dtype: torch.dtype, count: int
) -> None:
    random = torch.Generator("cpu").manual_seed(dist.get_rank())
    other = torch.randn(count, generator=random, dtype=dtype, device="cpu")
    mine = other.to(torch.get_default_device(), copy=True)
    dist.all_reduce(mine)
    dist.all_reduce(other, group=gloo)
    torch.testing.assert_close(mine.cpu(), other)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    require_same(everyone, [mine] * len(everyone))
