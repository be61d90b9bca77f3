"""Each function of torch.distributed gives the result of its definition, for any elements, operation, sizes and memory.

A seed draws the calls, so all ranks make the same ones. Some are repeated with other contents, in turns with a call of
other sizes. The tensors of the ranks lie in memory in different ways.

Bad use raises the errors that users of gloo and NCCL expect, with the way out, on every rank; the group goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import _make_nccl_premul_sum
from torch.distributed.distributed_c10d import _coalescing_manager

from mpicomm import InvalidUsageError, MpicommError, PeerError
from mpicomm.torch import communicator
from tests.helpers.inputs.torch_calls import FUNCTIONS, Call, Function, is_half
from tests.helpers.inputs.torch_cases import FLOATS, FLOATS8, MOVABLE, REDUCIBLE, Case, Op, reduced, require_same
from tests.helpers.jobs.pace import HANG_S

NUMBERS = (Op.SUM, Op.PRODUCT, Op.MIN, Op.MAX, Op.AVG)
BITS = (Op.BAND, Op.BOR, Op.BXOR)


def ops_of(dtype: torch.dtype) -> tuple[Any, ...]:
    if dtype in FLOATS8:  # values that are exact in two or three bits
        return (Op.MIN, Op.MAX, Op.SUM) if dtype is torch.float8_e4m3fn else (Op.MIN, Op.MAX)
    if dtype.is_complex:
        return (Op.SUM, Op.AVG)
    if dtype is torch.bool:
        return (*(op for op in NUMBERS if op != Op.AVG), *BITS)
    halves = [dist._make_nccl_premul_sum(factor) for factor in (0.5, torch.tensor([0.5]))] if dtype in FLOATS else []
    return (*NUMBERS, *halves) if dtype.is_floating_point else (*NUMBERS, *BITS)


def kinds_on(device: torch.device, function: Function) -> list[tuple[torch.dtype, Any]]:
    """Return element types and operations: on a GPU each type and each operation, but not all pairs.

    A GPU compiles a kernel for each pair, and the tests of Communicator have all of them.
    """
    if not function.reduces:
        return [(dtype, Op.SUM) for dtype in MOVABLE]
    pairs = [(dtype, op) for dtype in REDUCIBLE for op in ops_of(dtype)]
    if device.type == "cpu":
        return pairs
    every = (torch.float32, torch.uint8, torch.bool)
    return [(dtype, op) for dtype, op in pairs if dtype in every or is_half(op) or op == Op.SUM]


MOST_RANKS = 8
MORE = 20  # draws of each function with floats, of which some are long; only these are repeated
TURNS = 2


def drawn(function: Function, group: dist.ProcessGroup) -> Iterator[tuple[list[Call], bool]]:
    """Yield one call or two, and whether autograd wants gradients of their outputs while they are under way."""
    draw, rank = random.Random(function.name), dist.get_rank(group)
    kinds = kinds_on(torch.get_default_device(), function)
    for number, (dtype, op) in enumerate([*kinds, *[(torch.float32, Op.SUM)] * MORE]):
        repeated = number >= len(kinds)
        layouts = [(draw.randrange(30), draw.randrange(30)) for _ in range(MOST_RANKS)]
        memory = draw.choice(["", "", "own block", "first block", *("0", "3", "5") * (not function.joined)])
        uneven = draw.random() < 0.6 and function.divides and not memory.endswith("block")
        given = {
            "dtype": dtype,
            "op": op,
            "async_op": draw.random() < 0.5,
            "coalesced": draw.random() < 0.3 and function.coalesces,
            "function": function,
            "root": draw.randrange(MOST_RANKS),
            "columns": draw.choice([3, 3, 3, 1, 0, *[20_000] * repeated]),
            "uneven": uneven,
            "in_one_memory": "" if function.in_place else memory,
            # A tensor that is sent and receives lies alike on all ranks, because its memory is sent or reduced.
            "layouts": layouts[0 if function.in_place else rank],
        }
        bases = draw.sample([0, 1, 2, 5], 2)[: 1 + repeated]
        calls = [Call(group, base=base, **given) for base in bases]
        yield calls, draw.random() < 0.3 and dtype is torch.float32


# One test has all element types, because the ranks meet for every test.
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
def test_a_call_gives_the_result_of_its_definition(world: dist.ProcessGroup, function: Function) -> None:
    for calls, autograd_wants in drawn(function, world):
        for turn in range(TURNS if len(calls) > 1 else 1):
            for call in calls:
                call.fill(turn)
            if calls[0].coalesced:
                is_async, device = calls[0].async_op, calls[0].device if turn else None
                with _coalescing_manager(group=world, device=device, async_ops=is_async) as manager:
                    for call in calls:
                        call.begin()
                if is_async:
                    manager.wait()
            else:
                for call in calls:
                    work = call.begin()
                    if autograd_wants:
                        call.want_gradients()
                    call.wait(work)
            for call in calls:
                call.check(turn)


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


def test_tensors_without_dimensions(world: dist.ProcessGroup) -> None:
    for async_op in (False, True):
        case = Case(world, async_op=async_op)
        summed, shown, gathered = case.own(), case.own(), [case.empty() for _ in range(case.size)]
        case.wait(dist.all_reduce(summed, async_op=async_op))
        case.wait(dist.broadcast(shown, 0, async_op=async_op))
        case.wait(dist.all_gather(gathered, case.own(), async_op=async_op))
        everyone = case.all()
        require_same([summed, shown, *gathered], [reduced(everyone, Op.SUM), everyone[0], *everyone])


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("count", [10, 200_000])
def test_sums_that_round_are_near_gloos_and_the_same_on_all_ranks(
    world: dist.ProcessGroup, gloo: dist.ProcessGroup, dtype: torch.dtype, count: int
) -> None:
    numbers = torch.Generator("cpu").manual_seed(dist.get_rank())
    other = torch.randn(count, generator=numbers, dtype=dtype, device="cpu")
    mine = other.to(torch.get_default_device(), copy=True)
    dist.all_reduce(mine)
    dist.all_reduce(other, group=gloo)
    torch.testing.assert_close(mine.cpu(), other)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    require_same(everyone, [mine] * len(everyone))


@dataclass(frozen=True)
class Misuse:
    """A bad call, as a function of the number of ranks; the error of PyTorch's backends, and the text of mpicomm."""

    call: Callable[[int], object]
    error: type[Exception]
    text: str


def columns(count: int) -> torch.Tensor:
    """Return a tensor whose elements do not follow each other."""
    return torch.ones(3, 2 * count)[:, ::2]


BAD = {
    "a sparse tensor": Misuse(
        lambda size: dist.group.WORLD.broadcast([torch.eye(3).to_sparse()], dist.BroadcastOptions()),
        ValueError,
        r"tensor is a sparse tensor \(torch.sparse_coo\).*pass to_dense\(\)",
    ),
    "a tensor with gaps": Misuse(
        lambda size: dist.all_reduce(columns(2)),
        ValueError,
        r"tensor of shape \(3, 2\) with strides \(4, 2\) is not contiguous: pass tensor.contiguous\(\)",
    ),
    "an output with gaps": Misuse(
        lambda size: dist.all_gather_into_tensor(torch.ones(3, 2 * size)[:, ::2], torch.ones(3)),
        ValueError,
        "output_tensor of shape .* is not contiguous",
    ),
    "splits that do not add up": Misuse(
        lambda size: dist.all_to_all_single(torch.ones(2 * size), torch.ones(2 * size), [2] * size, [3] * size),
        RuntimeError,
        r"input_split_sizes=\[3.*must be \d numbers of rows, one for each rank, which add up to the \d rows of input",
    ),
    "a split below 0": Misuse(
        lambda size: dist.all_to_all_single(torch.ones(3 * size), torch.ones(size), None, [size + 1, -1]),
        RuntimeError,
        r"input_split_sizes=\[\d, -1\]",
    ),
    "different types": Misuse(
        lambda size: dist.all_gather_into_tensor(torch.ones(size), torch.ones(1, dtype=torch.int32)),
        TypeError,
        r"output_tensor has torch.float32 on (.*), but input_tensor has torch.int32 on \1",
    ),
    "different types in a list": Misuse(
        lambda size: _gather_into([torch.ones(1)] * (size - 1) + [torch.ones(1).int()]),
        TypeError,
        "tensor_list.*torch.int32",
    ),
    "an output that is too small": Misuse(
        lambda size: dist.all_gather_into_tensor(torch.ones(size + 1), torch.ones(1)),
        ValueError,
        r"output_tensor has \d elements and input_tensor 1: for \d ranks output_tensor needs \d",
    ),
    "too many outputs": Misuse(
        lambda size: dist.all_gather(list(torch.ones(size + 1, 1)), torch.ones(1)),
        ValueError,
        r"tensor_list has \d tensors for \d ranks: pass one for each",
    ),
    "an output of another size": Misuse(
        lambda size: dist.all_gather(list(torch.ones(size, 2)), torch.ones(1)),
        ValueError,
        r"tensor has 1 elements, but tensor_list\[\d\] has 2: they must agree",
    ),
    "a number with an operation on bits": Misuse(
        lambda size: dist.all_reduce(torch.ones(1), Op.BAND), ValueError, "op=band is not defined for float32"
    ),
    "an average of truth values": Misuse(
        lambda size: dist.all_reduce(torch.ones(1) > 0, Op.AVG),
        TypeError,
        "op=AVG is not defined for torch.bool: convert the tensor, or use SUM",
    ),
    "an average of unsigned numbers": Misuse(
        lambda size: dist.all_reduce(torch.ones(1, dtype=torch.uint16), Op.AVG),
        TypeError,
        "op=AVG is not defined for torch.uint16 of tensor: use SUM and divide",
    ),
    "a multiple of whole numbers": Misuse(
        lambda size: dist.all_reduce(torch.ones(1, dtype=torch.int32), _make_nccl_premul_sum(0.5)),
        TypeError,
        "op=PREMUL_SUM multiplies with a factor, and tensor has elements of torch.int32",
    ),
    "an empty list": Misuse(
        lambda size: dist.group.WORLD.allreduce_coalesced([]),
        ValueError,
        "the list of tensors is empty: pass one or more",
    ),
    "a tensor without memory": Misuse(
        lambda size: dist.all_reduce(torch.ones(3, device="meta")), RuntimeError, "tensor is on meta: pass one on cpu"
    ),
    "a new timeout": Misuse(
        lambda size: dist.group.WORLD.set_timeout(timedelta(seconds=1)),
        ValueError,
        r"timeout=0:00:01: a group keeps its timeout; make another with new_group\(timeout=...\)",
    ),
    "splits of which a rank's own part differs": Misuse(
        lambda size: dist.all_to_all_single(torch.ones(2 * size + 2), torch.ones(2 * size), _all_from_me(2 * size + 2)),
        ValueError,
        r"sendbuf holds 2 elements, but recvbuf has room for \d+: they must be equal",
    ),
    "a destination that is no rank": Misuse(
        lambda size: dist.send(torch.ones(1), size + 7),
        ValueError,
        r"send: dst=\d+ is no rank of this group of (\d): use 0 to \d",
    ),
    "a source that is no rank": Misuse(
        lambda size: dist.recv(torch.ones(1), size), ValueError, r"recv: src=\d is no rank of this group of (\d): use"
    ),
    "a root that is no rank": Misuse(
        lambda size: dist.group.WORLD.broadcast([torch.ones(1)], _rooted_at(size + 1)), ValueError, r"root=\d"
    ),
}


def _gather_into(outputs: list[torch.Tensor]) -> object:
    return dist.group.WORLD.allgather([outputs], [torch.ones(1)])


def _all_from_me(rows: int) -> list[int]:
    """Return splits that let a rank receive all rows from itself."""
    splits = [0] * dist.get_world_size()
    splits[dist.get_rank()] = rows
    return splits


def _rooted_at(rank: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = rank
    return options


@pytest.fixture(autouse=True)
def goes_on(world: dist.ProcessGroup) -> Iterator[None]:
    yield
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 3


@pytest.mark.parametrize("name", BAD)
def test_bad_use(name: str) -> None:
    misuse = BAD[name]
    with pytest.raises(InvalidUsageError, match=misuse.text) as raised:
        work = misuse.call(dist.get_world_size())
        if isinstance(work, dist.Work):
            work.wait()
    assert isinstance(raised.value, misuse.error)
    assert len(set(MPI.COMM_WORLD.allgather(type(raised.value).__name__))) == 1


def test_one_rank_that_passes_another_type_is_heard_by_all(world: dist.ProcessGroup) -> None:
    group = dist.new_group()
    if dist.get_world_size() > 1:
        dtype = torch.float64 if dist.get_rank() == 0 else torch.float32
        with pytest.raises(MpicommError, match="float64"):
            dist.all_reduce(torch.ones(70_000, dtype=dtype), group=group)
            communicator(group).check()  # for a GPU, because the call does not wait for its kernel there
    dist.destroy_process_group(group)


@pytest.mark.parametrize("root", [0, -1])
def test_a_wrong_list_of_the_root_is_heard_by_all(world: dist.ProcessGroup, root: int) -> None:
    size = dist.get_world_size()
    for lists in (list(torch.ones(size, 2)), list(torch.ones(size - 1, 1))):
        group, options = dist.new_group(timeout=timedelta(seconds=HANG_S)), dist.ScatterOptions()
        options.asyncOp, options.rootRank = False, root % size
        if size > 1:
            is_root = group.rank() == root % size
            with pytest.raises(MpicommError) as raised:
                group.scatter([torch.ones(1)], [lists] if is_root else [], options)
                group.barrier()  # for a GPU, because the call does not wait for its kernel there
            assert isinstance(raised.value, InvalidUsageError if is_root else PeerError)
        dist.destroy_process_group(group)
