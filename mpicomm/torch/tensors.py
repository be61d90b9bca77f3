"""Tensors as one-dimensional memory, the form that collectives take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from mpi4py import MPI

from mpicomm.errors import InvalidUsageError
from mpicomm.mpi import types
from mpicomm.torch.failures import ElementTypeError, TensorError


def flat(tensor: torch.Tensor, name: str, *, ordered: bool = False) -> torch.Tensor:
    """Return a view of ``tensor`` without gradient, with elements that follow each other in memory. Local.

    With ``ordered`` the elements have the order of their indices, because the other tensors of the call may have other
    orders in memory. If the memory has another order, the result is a copy, on a GPU in stream order. `put_back` copies
    it back.

    Raises `InvalidUsageError` for a tensor that has gaps, more than one piece of memory, or another device.
    """
    if tensor.layout is not torch.strided:
        raise InvalidUsageError(
            f"{name} is a sparse tensor ({tensor.layout}), but tensors must be dense: pass to_dense()"
        )
    if not (tensor.is_cuda or tensor.is_cpu):
        raise TensorError(f"{name} is on {tensor.device}: pass one on cpu or cuda")
    # This is for all tensors, because autograd may make an output require a gradient while a thread receives into it.
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor
    if _is_dense(tensor):
        return tensor.contiguous() if ordered else tensor.as_strided((tensor.numel(),), (1,))
    raise InvalidUsageError(
        f"{name} of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous: pass "
        "tensor.contiguous(), and copy the result back if it receives"
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the tensor has each element from the first to the last one in memory exactly once."""
    following = 1
    for stride, length in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if length != 1:
            if stride != following:
                return False
            following *= length
    return True


def put_back(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy ``memory``, a result of `flat` with ``ordered``, back to ``tensor``. Local; on a GPU stream-ordered."""
    if memory is not tensor and not tensor.is_contiguous():
        tensor.detach().copy_(memory)


def apart(send: torch.Tensor, receive: torch.Tensor, place: int | None = None) -> Any:
    """Return flat ``send``, or a copy if it shares memory with flat ``receive``. Local; on a GPU stream-ordered.

    MPI forbids such calls, and PyTorch's own backends allow them. Data at element ``place`` of ``receive`` becomes
    MPI.IN_PLACE.
    """
    begins, received = send.data_ptr(), receive.data_ptr()
    if place is not None and begins == received + place * receive.element_size():
        return MPI.IN_PLACE
    overlap = begins < received + receive.nbytes and received < begins + send.nbytes
    return send.clone() if overlap else send


@cache
def is_known(dtype: torch.dtype) -> bool:
    """Return whether mpicomm has the type of these elements. Local."""
    return types.torch_dtype(dtype) is not None


def movable(memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor of `flat` with elements that collectives move: bytes if mpicomm lacks the type. Local."""
    return memory if is_known(memory.dtype) else memory.view(-1).view(torch.uint8)


def split_counts(tensor: torch.Tensor, splits: Sequence[int], size: int, name: str) -> list[int]:
    """Return the elements of the part of ``tensor`` for each of ``size`` ranks. Local; raises `TensorError`.

    ``splits`` are numbers of rows, which are the elements along the first dimension. Without them all parts are equal.
    """
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


class Pieces:
    """The tensors of a list as one flat tensor: a view if they follow each other in memory, else a copy."""

    def __init__(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        first = self._tensors[0]
        for index, tensor in enumerate(self._tensors):
            if tensor.dtype != first.dtype or tensor.device != first.device:
                raise ElementTypeError(
                    f"{name}[{index}] has {tensor.dtype} on {tensor.device}, but {name}[0] has {first.dtype} on "
                    f"{first.device}: all tensors of a call have one type and one device"
                )
            if tensor.layout is not torch.strided:
                flat(tensor, f"{name}[{index}]")
        self.counts = [tensor.numel() for tensor in self._tensors]
        self._is_copy = not self._are_adjacent()
        total = sum(self.counts)
        self.memory = first.new_empty(total) if self._is_copy else first.as_strided((total,), (1,))

    def gather(self) -> torch.Tensor:
        """Return the flat tensor with the elements of all tensors. Local; on a GPU stream-ordered."""
        if self._is_copy:
            for tensor, piece in zip(self._tensors, self.memory.split(self.counts), strict=True):
                piece.view(tensor.shape).copy_(tensor)
        return self.memory

    def scatter(self) -> None:
        """Copy the elements of the flat tensor to the tensors. Local; on a GPU stream-ordered."""
        if self._is_copy:
            for tensor, piece in zip(self._tensors, self.memory.split(self.counts), strict=True):
                tensor.copy_(piece.view(tensor.shape))

    def _are_adjacent(self) -> bool:
        following = self._tensors[0].data_ptr()
        storage = self._tensors[0].untyped_storage().data_ptr()
        for tensor in self._tensors:
            if (
                not tensor.is_contiguous()
                or tensor.is_neg()  # a view with numbers that have the other sign in memory
                or tensor.is_conj()
                or tensor.data_ptr() != following
                or tensor.untyped_storage().data_ptr() != storage
            ):
                return False
            following += tensor.numel() * tensor.element_size()
        return True
