"""Bad use raises the errors that users of gloo and NCCL expect, with the way out, on every rank; the group goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch._C._distributed_c10d import _make_nccl_premul_sum

from mpicomm import InvalidUsageError, MpicommError, PeerError
from mpicomm.torch import communicator
from tests.helpers.inputs.torch_cases import Op
from tests.helpers.jobs.pace import HANG_S


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
        RuntimeError,
        r"output_split_sizes\[(\d)\] stands for \d+ elements, but input_split_sizes\[\1\] for 2: .* must agree",
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
