"""KnownCalls: a fast way for calls on plain tensors of a GPU that were made before, or have a known form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from mpicomm.collectives.gpu.plan_cache import KnownCall, PlanCache
from mpicomm.collectives.operations import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALLV,
    BCAST,
    REDUCE,
    REDUCE_SCATTER_BLOCK,
)
from mpicomm.mpi.plain_arrays import IN_PLACE, NOTHING, plain_tensor, tensor_in_blocks
from mpicomm.torch.reductions import op_of_one_call

Given = tuple[Any, ...]
"""The arguments of a `TensorCall`."""


def unknown(gpu: PlanCache, given: Given) -> None:
    """Find no call."""


@dataclass(slots=True)
class TensorCall:
    """A collective on tensors, or an operation on them."""

    carry_out: Callable[..., None]
    """Carries out any call. On tensors of a GPU it enqueues the call on PyTorch's current stream."""
    find: Callable[[PlanCache, Given], KnownCall | None] = unknown
    """Returns the call with these arguments of `carry_out` if the cache knows it; else None.

    A call that it has found is enqueued before it looks for the next one."""


class KnownCalls:
    """Finds known calls of a rank, and reads each tensor once, because a read takes as long as the rest of a call.

    The template of such calls refuses calls with wrong or negative counts, and with buffers that overlap.

    The methods are `TensorCall.find` of the methods of `TensorCollectives` with the same names. These take all other
    calls, and raise the errors of wrong calls.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def all_reduce(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        tensor, op, name, wire = given
        plain = plain_tensor(tensor) if type(tensor) is Tensor else None
        if plain is None:
            return None
        op = op_of_one_call(op, tensor, name)
        return None if op is None else gpu.find_plain(ALLREDUCE, "auto", IN_PLACE, plain, op, 0, wire or ())

    def reduce(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        tensor, op, root = given
        plain = plain_tensor(tensor) if type(tensor) is Tensor else None
        if plain is None:
            return None
        op = op_of_one_call(op, tensor, "tensor")
        sent, received = (IN_PLACE, plain) if self._rank == root else (plain, NOTHING)
        return None if op is None else gpu.find_plain(REDUCE, "auto", sent, received, op, root)

    def broadcast(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        tensor, root = given
        plain = plain_tensor(tensor) if type(tensor) is Tensor else None
        return None if plain is None else gpu.find_plain(BCAST, "auto", NOTHING, plain, None, root)

    def all_gather(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        output, own = given
        if not type(output) is type(own) is Tensor:
            return None
        received, block = plain_tensor(output), plain_tensor(own)
        if received is None or block is None or received[2] != block[2] or received[1] != self._size * block[1]:
            return None
        place = received[0] + self._rank * block[1] * block[2][0].itemsize
        return gpu.find_plain(ALLGATHER, "auto", IN_PLACE if block[0] == place else block, received, None, 0)

    def reduce_scatter(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        output, whole, op = given
        if not type(output) is type(whole) is Tensor:
            return None
        received, sent = plain_tensor(output), plain_tensor(whole)
        if received is None or sent is None or received[2] != sent[2]:
            return None
        op = op_of_one_call(op, output, "output")
        return None if op is None else gpu.find_plain(REDUCE_SCATTER_BLOCK, "auto", sent, received, op, 0)

    def all_to_all(self, gpu: PlanCache, given: Given) -> KnownCall | None:
        output, whole, output_splits, input_splits = given
        if not type(output) is type(whole) is Tensor:
            return None
        received = tensor_in_blocks(output, output_splits, self._size)
        sent = tensor_in_blocks(whole, input_splits, self._size)
        if received is None or sent is None or received[2] != sent[2]:
            return None
        return gpu.find_plain(ALLTOALLV, "auto", sent, received, None, 0)
