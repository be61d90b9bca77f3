"""Tensors as the flat memory that collectives take, and PyTorch's reductions as operations of mpicomm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.mpi.buffers import without_memory
from mpicomm.mpi.descriptors import tensor_list_descriptor
from mpicomm.mpi.ops import AVG


class TensorError(InvalidUsageError, TypeError, RuntimeError):
    """The error for tensors that a call does not take: their device, their types, or their split sizes.

    PyTorch's backends raise TypeError or RuntimeError for it.
    """


def flat(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return a view of ``tensor`` without gradient, with elements that follow each other in memory. Local.

    Raises `InvalidUsageError` for a tensor that has gaps, no memory, several parts of memory, or another device.
    """
    if tensor.layout is not torch.strided:
        raise InvalidUsageError(
            f"{name} is a sparse tensor ({tensor.layout}), but tensors must be dense: pass to_dense()"
        )
    if not (tensor.is_cuda or tensor.is_cpu):
        raise TensorError(f"{name} is on {tensor.device}: pass one on cpu or cuda")
    if not tensor.data_ptr() and tensor.numel():
        raise without_memory(tensor, name)
    # This is for all tensors, because autograd may make an output require a gradient while a thread receives into it.
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    if tensor.permute(by_stride).is_contiguous():  # the memory has each element once, in another order
        return tensor.as_strided((tensor.numel(),), (1,))
    raise InvalidUsageError(
        f"{name} of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: pass "
        "tensor.contiguous(), and copy the result back if it receives"
    )


def memory_at(address: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Return memory as a flat tensor of the type and the device of ``like``, which does not keep the memory. Local."""
    nbytes = count * like.element_size()
    if like.device.type == "cpu":
        return torch.frombuffer(MPI.buffer.fromaddress(address, nbytes), dtype=like.dtype)
    # The interface lacks some types of PyTorch.
    interface = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "strides": None, "version": 2}
    array = SimpleNamespace(__cuda_array_interface__=interface)
    return torch.as_tensor(array, device=like.device).view(like.dtype)


def movable(memory: torch.Tensor) -> torch.Tensor:
    """Return a flat tensor with elements that collectives move: bytes if mpicomm lacks the type. Local."""
    return memory if types.torch_dtype(memory.dtype) is not None else memory.view(-1).view(torch.uint8)


class TensorBlocks:
    """An argument of a collective with a block for each rank, as the flat tensor ``memory``. The constructor is local.

    The argument is a tensor, or a list of tensors. The memory has the elements in the order of their indices, because
    the ranks' tensors may have different orders in memory. It is a view if the elements have this order, else new
    memory: `packed` copies the tensors into it, and `unpack` copies it back. The tensors of a list may lie anywhere.
    The memory then spans them, perhaps over several allocations, and only the blocks may be read or written.

    ``counts`` are the elements of each block of a list, or of a tensor with ``splits``. Splits are numbers of rows,
    which are the elements along the first dimension; if they are empty, all blocks are equal. A tensor without splits
    has no counts: MPI cuts it into equal blocks. ``receive`` is whether the blocks are written.

    Raises `InvalidUsageError` as `flat` does, and for splits and lists that do not fit ``size`` ranks.
    """

    def __init__(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        name: str,
        size: int,
        splits: Sequence[int] | None = None,
        *,
        receive: bool = False,
    ) -> None:
        self._name, self._size = name, size
        self.counts: list[int] | None = None
        self._displs: list[int] | None = None
        """The first elements of the blocks in the memory; None if each block follows the block before."""
        if isinstance(tensors, torch.Tensor):
            memory = flat(tensors, name)
            self._tensors = [tensors.detach()]
            self._is_copy = not tensors.is_contiguous()
            self.memory = memory.new_empty(memory.numel()) if self._is_copy else memory
            if splits is not None:
                self.counts = _split_counts(tensors, splits, size, name)
            return
        if len(tensors) != size:
            raise InvalidUsageError(f"{name} has {len(tensors)} tensors for {size} ranks: pass one for each")
        self._tensors = [tensor.detach() for tensor in tensors]
        first = self._tensors[0]
        for index, tensor in enumerate(self._tensors):
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise TensorError(
                    f"{name}[{index}] has {tensor.dtype} on {tensor.device}, but {name}[0] has {first.dtype} on "
                    f"{first.device}: all tensors of a call have one type and one device"
                )
            if tensor.layout is not torch.strided:
                flat(tensor, f"{name}[{index}]")
        self.counts = [tensor.numel() for tensor in self._tensors]
        blocks = tensor_list_descriptor(self._tensors, receive=receive, on_host=not first.is_cuda)
        self._is_copy = blocks is None
        if blocks is None:
            self.memory = first.new_empty(sum(self.counts))
        else:
            self.memory, self._displs = memory_at(*blocks[:2], first), list(blocks[4])

    def packed(self, receive: TensorBlocks | None, *, in_order: bool = False) -> torch.Tensor:
        """Return the memory with the elements of the tensors. Local; on a GPU stream-ordered.

        If the tensors share memory with ``receive``, the memory is new: MPI forbids such calls, and PyTorch's own
        backends allow them. With ``in_order`` each block follows the block before.
        """
        if not self._is_copy and (
            (in_order and self._displs not in (None, [*accumulate(self.counts or (), initial=0)][:-1]))
            or (receive is not None and any(a < d and c < b for a, b in self._extents for c, d in receive._extents))
        ):
            self._is_copy, self._displs = True, None
            self.memory = self.memory.new_empty(sum(tensor.numel() for tensor in self._tensors))
        if self._is_copy:
            for tensor, block in self._copies():
                block.copy_(tensor)
        return self.memory

    def unpack(self) -> None:
        """Copy the memory to the tensors. Local; on a GPU stream-ordered."""
        if self._is_copy:
            for tensor, block in self._copies():
                tensor.copy_(block)

    def buffer(self) -> Any:
        """Return the memory as mpi4py takes it: with the counts and displacements, if there are any. Local."""
        memory, counts, displs = movable(self.memory), self.counts, self._displs
        if counts is None:
            return memory
        width = 1 if memory.dtype == self.memory.dtype else self.memory.element_size()
        counts = [count * width for count in counts]
        return [memory, counts if displs is None else (counts, [displ * width for displ in displs])]

    def address(self, rank: int = 0) -> int:
        """Return the address of the block of ``rank``. Local."""
        if self.counts is None:
            place = rank * (self.memory.numel() // self._size)
        else:
            place = sum(self.counts[:rank]) if self._displs is None else self._displs[rank]
        address: int = self.memory.data_ptr() + place * self.memory.element_size()
        return address

    def require_block(self, own: TensorBlocks, rank: int) -> None:
        """Raise unless the tensor ``own`` can be the block of ``rank``. Local."""
        self.require_type_of(own)
        count = own.memory.numel()
        if self.counts is None:
            if self.memory.numel() != count * self._size:
                raise InvalidUsageError(
                    f"{self._name} has {self.memory.numel()} elements and {own._name} {count}: for {self._size} ranks "
                    f"{self._name} needs {count * self._size}"
                )
        elif count != self.counts[rank]:
            raise InvalidUsageError(
                f"{own._name} has {count} elements, but {self._name}[{rank}] has {self.counts[rank]}: they must agree"
            )

    def require_type_of(self, other: TensorBlocks) -> None:
        """Raise unless both have one type and one device. Local."""
        mine, theirs = self.memory, other.memory
        if mine.dtype is not theirs.dtype or mine.device != theirs.device:
            raise TensorError(
                f"{self._name} has {mine.dtype} on {mine.device}, but {other._name} has {theirs.dtype} on "
                f"{theirs.device}: they must agree"
            )

    @property
    def _extents(self) -> list[tuple[int, int]]:
        """The addresses of the first byte and after the last byte of each block of the memory that has elements."""
        whole, counts = [self.memory.numel()], self.counts
        ranks = enumerate(whole if counts is None or self._displs is None else counts)
        nbytes = self.memory.element_size()
        return [(self.address(rank), self.address(rank) + count * nbytes) for rank, count in ranks if count]

    def _copies(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each tensor and its block of the memory, which is new."""
        blocks = self.memory.split([tensor.numel() for tensor in self._tensors])
        for tensor, block in zip(self._tensors, blocks, strict=True):
            yield tensor, block.view(tensor.shape)


def _split_counts(tensor: torch.Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    rows, total = tensor.size(0) if tensor.dim() else 1, tensor.numel()
    if not splits:
        if rows % size:
            raise TensorError(
                f"{name} has {rows} rows, which {size} ranks cannot share equally: pass {name}_split_sizes"
            )
        return [total // size] * size
    if len(splits) != size or sum(splits) != rows or min(splits) < 0:
        raise TensorError(
            f"{name}_split_sizes={list(splits)} must be {size} numbers of rows, one for each rank, which add up to "
            f"the {rows} rows of {name}"
        )
    of_row = total // rows if rows else 0
    return list(splits) if of_row == 1 else [split * of_row for split in splits]


_Kind = dist.ReduceOp.RedOpType
_PREMUL_SUM = int(_Kind.PREMUL_SUM)
_OPS = {
    _Kind.SUM: MPI.SUM,
    _Kind.AVG: AVG,
    _Kind.PREMUL_SUM: MPI.SUM,
    _Kind.PRODUCT: MPI.PROD,
    _Kind.MIN: MPI.MIN,
    _Kind.MAX: MPI.MAX,
    _Kind.BAND: MPI.BAND,
    _Kind.BOR: MPI.BOR,
    _Kind.BXOR: MPI.BXOR,
}
# A sum of truth values is true if one of them is true, as in PyTorch's backend for NCCL.
_LOGICAL_OPS = {
    **dict.fromkeys((_Kind.SUM, _Kind.MAX, _Kind.BOR), MPI.LOR),
    **dict.fromkeys((_Kind.PRODUCT, _Kind.MIN, _Kind.BAND), MPI.LAND),
    _Kind.BXOR: MPI.LXOR,
}
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_WITHOUT_DIVISION = (torch.uint16, torch.uint32, torch.uint64)  # in PyTorch


@dataclass(frozen=True, slots=True)
class TorchReduction:
    """How a Communicator carries out a ``ReduceOp`` on elements of one type."""

    op: MPI.Op
    direct_op: MPI.Op | None
    """The operation, if this rank does not work on its elements before or after it, else None."""
    averages_integers: bool
    """Whether each rank divides the sum of integers, toward zero, as PyTorch's backend for NCCL does."""
    factor: Any = None
    """The factor of each rank's elements before the sum; None for 1."""

    def scaled(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the contribution of this rank: ``memory``, or new memory. Local; on a GPU stream-ordered."""
        return memory if self.factor is None else (memory * self.factor).to(memory.dtype)

    def finish(self, memory: torch.Tensor, size: int) -> None:
        """Divide a sum of integers by ``size``, if the reduction is their average. As local as `scaled`."""
        if self.averages_integers:
            memory.div_(size, rounding_mode="trunc")


_reductions: dict[tuple[int, torch.dtype], TorchReduction] = {}


def reduction_of(op: Any, memory: torch.Tensor, name: str) -> TorchReduction:
    """Return the reduction by a ``ReduceOp`` of ``memory``, a result of `flat` for the tensor ``name``. Local.

    Raises `TensorError` for elements that mpicomm cannot reduce, and `InvalidUsageError` for unknown operations.
    """
    key = hash(op), memory.dtype  # the hash is the number of the kind, and takes less time than to read the kind
    reduction = _reductions.get(key)
    if reduction is None:
        reduction = _reductions[key] = _checked_reduction(op if isinstance(op, _Kind) else op.op, memory.dtype, name)
    if key[0] == _PREMUL_SUM and not isinstance(op, _Kind):
        _, factor = op.__getstate__()  # the only way to the factor from Python
        return replace(reduction, factor=factor)
    return reduction


def direct_op_of(op: Any, memory: torch.Tensor, name: str) -> MPI.Op | None:
    """Return `TorchReduction.direct_op` of `reduction_of`."""
    found = _reductions.get((hash(op), memory.dtype)) or reduction_of(op, memory, name)
    return found.direct_op


def _checked_reduction(kind: Any, dtype: torch.dtype, name: str) -> TorchReduction:
    if types.torch_dtype(dtype) is None:
        raise TensorError(
            f"{name} has elements of {dtype}, which mpicomm cannot reduce: convert it, for example to torch.bfloat16"
        )
    integers, scaled = kind == _Kind.AVG and dtype in _INTEGERS, kind == _Kind.PREMUL_SUM
    if integers and dtype in _WITHOUT_DIVISION:
        raise TensorError(
            f"op=AVG is not defined for {dtype} of {name}: use SUM and divide, or convert it to torch.int64"
        )
    if scaled and not (dtype.is_floating_point or dtype.is_complex):
        raise TensorError(
            f"op=PREMUL_SUM multiplies with a factor, and {name} has elements of {dtype}: convert it to a type of "
            "floats"
        )
    op = MPI.SUM if integers else (_LOGICAL_OPS if dtype is torch.bool else _OPS).get(kind)
    if op is None:
        if dtype is torch.bool:
            raise TensorError(f"op={kind.name} is not defined for torch.bool: convert the tensor, or use SUM")
        raise InvalidUsageError(f"op={kind.name} is unknown: use one of {', '.join(each.name for each in _OPS)}")
    return TorchReduction(op, None if integers or scaled else op, integers)
