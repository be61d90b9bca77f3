"""Collectives give the results of their definition, for every element type.

PyTorch's own tests, and test_tensors.py, have the other collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.helpers.inputs.torch_cases import FLOATS8, MOVABLE, REDUCIBLE, Case, Op, reduced, require_same

Tensors = list[torch.Tensor]
Results = tuple[Tensors, Tensors]
"""The tensors that a call has given, and the right tensors."""


def all_gather(case: Case) -> Results:
    got = [case.empty(2, 3) for _ in range(case.size)]
    case.wait(dist.all_gather(got, case.own(2, 3), group=case.group, async_op=case.async_op))
    return got, case.all(2, 3)


def all_gather_into_columns_of_one_tensor(case: Case) -> Results:
    got = case.empty(7, case.size)
    case.wait(dist.all_gather(list(got.unbind(1)), case.own(7), group=case.group, async_op=case.async_op))
    return [got], [torch.stack(case.all(7), 1)]


def all_gather_of_different_sizes(case: Case) -> Results:
    got = [case.empty(rank + 1) for rank in range(case.size)]
    case.wait(dist.all_gather(got, case.own(case.rank + 1), group=case.group, async_op=case.async_op))
    return got, [case.of(rank, rank + 1) for rank in range(case.size)]


def gather(case: Case) -> Results:
    got, expected = [], []
    for root in range(case.size):
        outputs = [case.empty(4, 2) for _ in range(case.size)] if case.rank == root else None
        given = case.own(4, 2, salt=root)
        case.wait(dist.gather(given, outputs, group_dst=root, group=case.group, async_op=case.async_op))
        if outputs:
            got, expected = outputs, case.all(4, 2, salt=root)
    return got, expected


def gather_single(case: Case) -> Results:
    """The call of `torch.distributed.gather_single`, which versions up to 2.14 lack."""
    got, expected = [], []
    for root in range(case.size):
        options = dist.GatherOptions()
        options.rootRank, options.asyncOp = root, case.async_op
        output = case.empty(2 * case.size, 3) if case.rank == root else case.empty(0)
        work = case.group.gather_single(output, case.own(2, 3, salt=root), options)
        case.wait(work if case.async_op else None)
        if case.rank == root:
            got, expected = [output], [torch.cat(case.all(2, 3, salt=root))]
    return got, expected


def scatter(case: Case) -> Results:
    got = [case.empty(4, 2) for _ in range(case.size)]
    for root, output in enumerate(got):
        given = [case.own(4, 2, salt=rank) for rank in range(case.size)] if case.rank == root else None
        case.wait(dist.scatter(output, given, group_src=root, group=case.group, async_op=case.async_op))
    return got, [case.of(root, 4, 2, salt=case.rank) for root in range(case.size)]


def all_to_all_single_of_different_splits(case: Case) -> Results:
    def splits(rank: int) -> list[int]:
        return [(rank + 2 * peer) % 3 for peer in range(case.size)]

    received = [splits(rank)[case.rank] for rank in range(case.size)]
    given = case.own(sum(splits(case.rank)), 3)
    got = case.empty(sum(received), 3)
    work = dist.all_to_all_single(got, given, received, splits(case.rank), group=case.group, async_op=case.async_op)
    case.wait(work)
    sent = [case.of(rank, sum(splits(rank)), 3).split(splits(rank)) for rank in range(case.size)]
    return [got], [torch.cat([each[case.rank] for each in sent])]


def all_to_all(case: Case) -> Results:
    got = [case.empty(peer + 1) for peer in range(case.size)]
    given = [case.own(case.rank + 1, salt=peer) for peer in range(case.size)]
    case.wait(dist.all_to_all(got, given, group=case.group, async_op=case.async_op))
    return got, [case.of(peer, peer + 1, salt=case.rank) for peer in range(case.size)]


def coalesced_all_gather_into_tensor(case: Case) -> Results:
    got = [case.empty(case.size * count, 3) for count in (1, 5)]
    with _coalescing_manager(group=case.group, device=case.device, async_ops=case.async_op) as manager:
        for output, count in zip(got, (1, 5), strict=True):
            dist.all_gather_into_tensor(output, case.own(count, 3), group=case.group)
    if case.async_op:
        manager.wait()
    return got, [torch.cat(case.all(count, 3)) for count in (1, 5)]


MOVES: list[Callable[[Case], Results]] = [
    all_gather,
    all_gather_into_columns_of_one_tensor,
    all_gather_of_different_sizes,
    gather,
    gather_single,
    scatter,
    all_to_all_single_of_different_splits,
    all_to_all,
    coalesced_all_gather_into_tensor,
]


# One test has all element types, because the ranks meet for every test.
@pytest.mark.parametrize("move", MOVES)
def test_moves(world: dist.ProcessGroup, move: Callable[[Case], Results]) -> None:
    for dtype in MOVABLE:
        for async_op in (False, True):
            require_same(*move(Case(world, dtype, async_op)))


Reduction = Callable[[Case, Op], Results]


def all_reduce(case: Case, op: Op) -> Results:
    got = case.own(3, 5)
    case.wait(dist.all_reduce(got, op, group=case.group, async_op=case.async_op))
    return [got], [reduced(case.all(3, 5), op)]


def reduce_scatter(case: Case, op: Op) -> Results:
    got = case.empty(4, 2)
    given = [case.own(4, 2, salt=peer) for peer in range(case.size)]
    case.wait(dist.reduce_scatter(got, given, op, group=case.group, async_op=case.async_op))
    return [got], [reduced(case.all(4, 2, salt=case.rank), op)]


def reduce_scatter_of_different_sizes(case: Case, op: Op) -> Results:
    got = case.empty(case.rank + 1)
    given = [case.own(peer + 1, salt=peer) for peer in range(case.size)]
    case.wait(dist.reduce_scatter(got, given, op, group=case.group, async_op=case.async_op))
    return [got], [reduced(case.all(case.rank + 1, salt=case.rank), op)]


def coalesced_reduce_scatter_tensor(case: Case, op: Op) -> Results:
    got = [case.empty(count, 3) for count in (1, 5)]
    with _coalescing_manager(group=case.group, async_ops=case.async_op) as manager:
        for output, count in zip(got, (1, 5), strict=True):
            dist.reduce_scatter_tensor(output, case.own(count * case.size, 3), op, group=case.group)
    if case.async_op:
        manager.wait()
    return got, [reduced(case.all(count * case.size, 3), op).chunk(case.size)[case.rank] for count in (1, 5)]


REDUCTIONS: list[Reduction] = [
    all_reduce,
    reduce_scatter,
    reduce_scatter_of_different_sizes,
    coalesced_reduce_scatter_tensor,
]
FOR_NUMBERS = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.AVG)
FOR_BITS = (Op.BAND, Op.BOR, Op.BXOR)


def ops_of(dtype: torch.dtype) -> tuple[Op, ...]:
    if dtype in FLOATS8:  # values that are exact in two or three bits
        return (Op.MIN, Op.MAX, Op.SUM) if dtype is torch.float8_e4m3fn else (Op.MIN, Op.MAX)
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)
    if dtype is torch.bool:
        return (*(op for op in FOR_NUMBERS if op != Op.AVG), *FOR_BITS)
    return FOR_NUMBERS if dtype.is_floating_point else (*FOR_NUMBERS, *FOR_BITS)


def calls_on(device: torch.device) -> list[tuple[torch.dtype, Op]]:
    """Return element types and operations: on a GPU each type and each operation, but not all pairs.

    A GPU compiles a kernel for each pair, and the tests of Communicator have all of them.
    """
    pairs = [(dtype, op) for dtype in REDUCIBLE for op in ops_of(dtype)]
    if device.type == "cpu":
        return pairs
    return [(dtype, op) for dtype, op in pairs if dtype in (torch.float32, torch.uint8, torch.bool) or op == Op.SUM]


def require_close(got: Tensors, expected: Tensors) -> None:
    torch.testing.assert_close(got, expected, check_device=False)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_reductions(world: dist.ProcessGroup, reduction: Reduction) -> None:
    for dtype, op in calls_on(torch.get_default_device()):
        # The quotient of a complex and a real number has other last bits if both are divided as complex numbers.
        require = require_close if dtype.is_complex and op == Op.AVG else require_same
        for async_op in (False, True):
            require(*reduction(Case(world, dtype, async_op), op))


@dataclass
class Turned(Case):
    """Tensors whose columns follow each other in memory: those that are sent or reduced, or that receive, or both."""

    turned: str = "all"

    def own(self, *shape: int, salt: int = 0) -> torch.Tensor:
        return _turned(super().own(*shape, salt=salt)) if self.turned != "received" else super().own(*shape, salt=salt)

    def empty(self, *shape: int) -> torch.Tensor:
        return _turned(super().empty(*shape)) if self.turned != "sent" else super().empty(*shape)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    order = list(reversed(range(tensor.dim())))
    return tensor.permute(order).contiguous().permute(order)


@pytest.mark.parametrize("turned", ["all", "sent", "received"])
def test_tensors_in_another_order_of_memory(world: dist.ProcessGroup, turned: str) -> None:
    for move in MOVES:
        require_same(*move(Turned(world, turned=turned)))
    for reduction in REDUCTIONS:
        require_same(*reduction(Turned(world, turned=turned), Op.SUM))
    sent = Turned(world).own(3, 4, 5)
    dist.broadcast(sent, dist.get_world_size() - 1)
    require_same([sent], Case(world).all(3, 4, 5)[-1:])
