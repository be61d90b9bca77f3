"""Tensors of all ranks that every rank can compute, so that it knows the right results of torch.distributed."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from mpi4py import MPI

Op = dist.ReduceOp

INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
FLOATS8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REDUCIBLE = (*FLOATS, *FLOATS8, torch.complex64, *INTEGERS, torch.bool)
MOVABLE = (*REDUCIBLE, torch.complex128)

_JOINED: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    Op.SUM: operator.add,
    Op.PRODUCT: operator.mul,
    Op.MIN: torch.minimum,
    Op.MAX: torch.maximum,
    Op.BAND: operator.and_,
    Op.BOR: operator.or_,
    Op.BXOR: operator.xor,
}
_JOINED_TRUTHS: dict[object, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys((Op.SUM, Op.MAX, Op.BOR), operator.or_),
    **dict.fromkeys((Op.PRODUCT, Op.MIN, Op.BAND), operator.and_),
    Op.BXOR: operator.xor,
}


def tensor_of(rank: int, dtype: torch.dtype, shape: Sequence[int], salt: int = 0) -> torch.Tensor:
    """Return the values of ``rank``: small whole numbers other than 0, so that reductions of few ranks are exact."""
    random = torch.Generator("cpu").manual_seed(100 * salt + rank)
    numbers = torch.randint(1, 4, tuple(shape), generator=random, device="cpu")
    if dtype is torch.bool:
        return numbers > 2
    if dtype.is_signed:
        numbers *= 1 - 2 * torch.randint(0, 2, tuple(shape), generator=random, device="cpu")
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.double().flip(-1) if shape else numbers.double()).to(dtype)
    return numbers.to(dtype)


def reduced(tensors: Sequence[torch.Tensor], op: object) -> torch.Tensor:
    """Return the reduction of the ``tensors`` of all ranks."""
    if tensors[0].dtype in FLOATS8:  # PyTorch does not calculate with them
        return reduced([tensor.float() for tensor in tensors], op).to(tensors[0].dtype)
    if op == Op.AVG:
        total = functools.reduce(operator.add, tensors)
        if total.is_floating_point() or total.is_complex():
            return total / len(tensors)
        return total.div(len(tensors), rounding_mode="trunc")
    joined = _JOINED_TRUTHS if tensors[0].dtype is torch.bool else _JOINED
    return functools.reduce(joined[op], tensors)


@dataclass
class Case:
    """A call of one group with one element type: its tensors, and the wait for it."""

    group: dist.ProcessGroup
    dtype: torch.dtype = torch.float32
    async_op: bool = False
    rank: int = field(init=False)
    size: int = field(init=False)
    device: torch.device = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        # The device of the test's tensors; gloo takes few calls on tensors of a GPU.
        self.device = torch.device("cpu") if dist.get_backend(self.group) == "gloo" else torch.get_default_device()

    def of(self, rank: int, *shape: int, salt: int = 0) -> torch.Tensor:
        """Return the tensor that ``rank`` passes, on the host, because PyTorch computes the right result there."""
        return tensor_of(rank, self.dtype, shape, salt)

    def own(self, *shape: int, salt: int = 0) -> torch.Tensor:
        """Return the tensor that this rank passes."""
        return self.of(self.rank, *shape, salt=salt).to(self.device)

    def all(self, *shape: int, salt: int = 0) -> list[torch.Tensor]:
        """Return the tensors that all ranks pass, on the host."""
        return [self.of(rank, *shape, salt=salt) for rank in range(self.size)]

    def empty(self, *shape: int) -> torch.Tensor:
        """Return a tensor that receives. No rank sends its bytes."""
        nbytes = torch.Size(shape).numel() * self.dtype.itemsize
        byte = 0 if self.dtype is torch.bool else 77
        filled = torch.full((nbytes,), byte, dtype=torch.uint8, device=self.device)
        return filled.view(self.dtype).view(shape)

    def wait(self, work: dist.Work | None) -> None:
        """Wait for the call if it is asynchronous."""
        if self.async_op:
            assert work is not None
            work.wait()
            assert self.device.type == "cuda" or work.is_completed()
        else:
            assert work is None


@contextmanager
def while_the_last_rank_is_late() -> Iterator[bool]:
    """Tell whether this rank is on time. The last rank begins when the others have left the block."""
    world = MPI.COMM_WORLD
    on_time = world.rank != world.size - 1
    if not on_time:
        world.Barrier()
    yield on_time
    if on_time:
        world.Barrier()


def finish(case: Case) -> None:
    """Wait for the GPU, if the tensors are there."""
    if case.device.type == "cuda":
        torch.cuda.synchronize()


def require_same(got: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    """Assert that tensors are equal bit for bit, also in type and shape."""
    assert len(got) == len(expected)
    for index, (mine, right) in enumerate(zip(got, expected, strict=True)):
        what = (mine.dtype, mine.shape)
        assert what == (right.dtype, right.shape), f"tensor {index}: {what} for {(right.dtype, right.shape)}"
        assert torch.equal(_bits(mine), _bits(right)), f"tensor {index}: {mine} for {right}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
