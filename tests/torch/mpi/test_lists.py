"""Lists of tensors: they are sent from and received into the places where they lie, whatever these are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist

from tests.helpers.inputs.torch_cases import Case, Op, reduced, require_same

Tensors = list[torch.Tensor]
COLUMNS = 3


def apart(case: Case, rows: Sequence[int]) -> Tensors:
    return [case.empty(count, COLUMNS) for count in rows]


def parts(case: Case, rows: Sequence[int]) -> Tensors:
    return list(case.empty(sum(rows), COLUMNS).split(list(rows)))


def from_the_last_to_the_first(case: Case, rows: Sequence[int]) -> Tensors:
    return parts(case, rows[::-1])[::-1]


def with_gaps(case: Case, rows: Sequence[int]) -> Tensors:
    return [part[:-1] for part in parts(case, [count + 1 for count in rows])]


def of_two_allocations(case: Case, rows: Sequence[int]) -> Tensors:
    both = with_gaps(case, rows), from_the_last_to_the_first(case, rows)
    return [both[index % 2][index] for index in range(len(rows))]


def with_gradients(case: Case, rows: Sequence[int]) -> Tensors:
    return [part.requires_grad_() for part in apart(case, rows)]


def half_an_element_apart(case: Case, rows: Sequence[int]) -> Tensors:
    if case.device.type != "cpu":  # PyTorch makes no such tensors itself
        return apart(case, rows)
    nbytes = case.dtype.itemsize * COLUMNS
    memory, place, made = bytearray(b"M" * (sum(rows) + len(rows)) * nbytes), 0, Tensors()
    for count in rows:
        given = {"count": count * COLUMNS, "offset": place} if count else {"count": 1}
        made.append(torch.frombuffer(memory, dtype=case.dtype, **given)[: count * COLUMNS].view(count, COLUMNS))
        place += count * nbytes + case.dtype.itemsize // 2
    return made


def columns(case: Case, rows: Sequence[int]) -> Tensors:
    return [case.empty(COLUMNS, count).t() for count in rows]


def with_the_other_sign(case: Case, rows: Sequence[int]) -> Tensors:
    return [torch._neg_view(part) for part in parts(case, rows)]


LAYOUTS = [
    *(apart, parts, from_the_last_to_the_first, with_gaps, of_two_allocations, with_gradients),
    *(half_an_element_apart, columns, with_the_other_sign),
]
Layout = Callable[[Case, Sequence[int]], Tensors]


def calls() -> Iterator[tuple[torch.dtype, Layout, Layout, bool]]:
    """Yield the type of elements, the layouts of outputs and inputs, and whether the call is asynchronous."""
    for number, outputs in enumerate(LAYOUTS):
        for inputs in LAYOUTS:
            yield torch.float32, outputs, inputs, False
        for dtype in (torch.complex64, torch.bfloat16, torch.float8_e5m2):
            yield dtype, LAYOUTS[number % 6], LAYOUTS[(number + 2) % 6], True


def filled(made: Tensors, values: Tensors) -> Tensors:
    with torch.no_grad():
        for tensor, value in zip(made, values, strict=True):
            tensor.copy_(value)
    return made


def require_values(got: Tensors, expected: Tensors) -> None:
    require_same([tensor.detach().resolve_neg().clone() for tensor in got], expected)


def test_lists_in_any_layout(world: dist.ProcessGroup) -> None:
    for dtype, outputs, inputs, async_op in calls():
        case = Case(world, dtype, async_op)
        rank, ranks = case.rank, range(case.size)

        def blocks(sender: int, rows: Sequence[int], case: Case = case) -> Tensors:
            return [case.of(sender, count, COLUMNS, salt=peer) for peer, count in enumerate(rows)]

        sent = blocks(rank, [(rank + 2 * peer) % 3 for peer in ranks])
        came = [case.of(peer, (peer + 2 * rank) % 3, COLUMNS, salt=rank) for peer in ranks]
        given = filled(inputs(case, [*map(len, sent)]), sent)
        got = outputs(case, [*map(len, came)])
        case.wait(dist.all_to_all(got, given, async_op=async_op))
        require_values(got, came)
        require_values(given, sent)
        rows = [peer % 3 for peer in ranks]
        everyone = [case.of(peer, count, COLUMNS) for peer, count in enumerate(rows)]
        (own,) = filled(apart(case, [rows[rank]]), [everyone[rank]])
        got = outputs(case, rows)
        case.wait(dist.all_gather(got, own, async_op=async_op))
        require_values(got, everyone)
        got = outputs(case, rows) if rank == 1 % case.size else []
        case.wait(dist.gather(own, got or None, 1 % case.size, async_op=async_op))
        require_values(got, everyone if got else [])
        given = filled(inputs(case, rows), blocks(0, rows)) if rank == 0 else []
        case.wait(dist.scatter(own, given or None, 0, async_op=async_op))
        require_values([own], [blocks(0, rows)[rank]])
        if dtype.itemsize > 2:
            given = filled(inputs(case, rows), blocks(rank, rows))
            case.wait(dist.reduce_scatter(own, given, async_op=async_op))
            require_values([own], [reduced([blocks(peer, rows)[rank] for peer in ranks], Op.SUM)])


@pytest.mark.parametrize("async_op", [False, True])
def test_outputs_that_share_memory_have_what_comes_to_the_last(world: dist.ProcessGroup, async_op: bool) -> None:
    case = Case(world, async_op=async_op)
    memory, expected = torch.zeros(2 * case.size + 2, device=case.device), torch.zeros(2 * case.size + 2, device="cpu")
    outputs = [memory[2 * peer :][:4] for peer in range(case.size)]
    for peer, values in enumerate(case.all(4)):
        expected[2 * peer :][:4] = values
    case.wait(dist.all_to_all(outputs, [case.own(4)] * case.size, async_op=async_op))
    require_same([memory], [expected])
    memory.zero_()
    case.wait(dist.all_gather(outputs, case.own(4), async_op=async_op))
    require_same([memory], [expected])


@pytest.mark.parametrize("async_op", [False, True])
def test_outputs_between_and_on_inputs(world: dist.ProcessGroup, async_op: bool) -> None:
    case = Case(world, async_op=async_op)
    came = [each[case.rank] for each in case.all(case.size, 5)]
    for shift in (0, 3, 5):  # from an input to the output that shares memory with it or follows it
        memory = torch.zeros(10 * case.size + 10, device=case.device)
        inputs = [memory[10 * peer :][:5] for peer in range(case.size)]
        outputs = [memory[10 * peer + shift :][:5] for peer in reversed(range(case.size))]
        filled(inputs, list(case.own(case.size, 5)))
        case.wait(dist.all_to_all(outputs, inputs, async_op=async_op))
        require_same(outputs, came)


def test_lists_of_a_part_of_the_ranks(world: dist.ProcessGroup) -> None:
    for first in range(dist.get_world_size() - 1):
        group = dist.new_group([first, first + 1])
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            case = Case(group)
            sent = filled(of_two_allocations(case, [2, 1]), [case.own(2, COLUMNS), case.own(1, COLUMNS)])
            got = from_the_last_to_the_first(case, [2 - case.rank] * 2)
            dist.all_to_all(got, sent, group=group)
            require_same(got, case.all(2 - case.rank, COLUMNS))
            dist.destroy_process_group(group)
