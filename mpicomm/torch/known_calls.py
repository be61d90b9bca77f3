"""KnownCalls: a fast way for calls on plain tensors of a GPU that were made before, or have a known form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from mpicomm.api.communicator import Communicator
from mpicomm.collectives.operations import (
    ALLGATHER,
    ALLREDUCE,
    ALLTOALLV,
    BCAST,
    REDUCE,
    REDUCE_SCATTER_BLOCK,
    Operation,
)
from mpicomm.collectives.wire import Wire
from mpicomm.mpi.plain_arrays import IN_PLACE, NOTHING, PlainArray, PlainBlocks, in_blocks, plain_tensor
from mpicomm.torch.reductions import op_of_one_call


def _unknown(stream: int, *given: Any) -> bool:
    return False


class TensorCall(NamedTuple):
    """A collective on tensors, or an operation on them, in two ways that take the same arguments."""

    carry_out: Callable[..., None]
    """Carries out any call. On tensors of a GPU it enqueues the call on PyTorch's current stream."""
    known: Callable[..., bool] = _unknown
    """Enqueues a known call on the stream with the address before the arguments; returns whether it has done so."""


class KnownCalls:
    """Enqueues known calls of ``comm``, and reads each tensor once, because a read takes as long as the rest of a call.

    The plan of a form refuses calls with wrong counts, and with buffers that overlap.

    The methods are `TensorCall.known` of the methods of `TensorCollectives` with the same names. These take all other
    calls, and raise the errors of wrong calls.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._rank, self._size = comm.rank, comm.size

    def all_reduce(
        self, stream: int, tensor: torch.Tensor, op: Any, name: str = "tensor", wire: Wire | None = None
    ) -> bool:
        """See `TensorCollectives.all_reduce`."""
        plain = plain_tensor(tensor) if type(tensor) is torch.Tensor else None
        if plain is None:
            return False
        op = op_of_one_call(op, tensor, name)
        return op is not None and self._enqueue(ALLREDUCE, stream, IN_PLACE, plain, op, 0, wire or ())

    def reduce(self, stream: int, tensor: torch.Tensor, op: Any, root: int) -> bool:
        """See `TensorCollectives.reduce`."""
        plain = plain_tensor(tensor) if type(tensor) is torch.Tensor else None
        if plain is None:
            return False
        op = op_of_one_call(op, tensor, "tensor")
        sent, received = (IN_PLACE, plain) if self._rank == root else (plain, NOTHING)
        return op is not None and self._enqueue(REDUCE, stream, sent, received, op, root)

    def broadcast(self, stream: int, tensor: torch.Tensor, root: int) -> bool:
        """See `TensorCollectives.broadcast`."""
        plain = plain_tensor(tensor) if type(tensor) is torch.Tensor else None
        return plain is not None and self._enqueue(BCAST, stream, NOTHING, plain, None, root)

    def all_gather(self, stream: int, output: torch.Tensor, given: torch.Tensor) -> bool:
        """See `TensorCollectives.all_gather`."""
        if not type(output) is type(given) is torch.Tensor:
            return False
        received, block = plain_tensor(output), plain_tensor(given)
        if received is None or block is None or received[2] != block[2] or received[1] != self._size * block[1]:
            return False
        place = received[0] + self._rank * block[1] * block[2][0].itemsize
        return self._enqueue(ALLGATHER, stream, IN_PLACE if block[0] == place else block, received)

    def reduce_scatter(self, stream: int, output: torch.Tensor, given: torch.Tensor, op: Any) -> bool:
        """See `TensorCollectives.reduce_scatter`."""
        if not type(output) is type(given) is torch.Tensor:
            return False
        received, sent = plain_tensor(output), plain_tensor(given)
        if received is None or sent is None or received[2] != sent[2]:
            return False
        op = op_of_one_call(op, output, "output")
        return op is not None and self._enqueue(REDUCE_SCATTER_BLOCK, stream, sent, received, op)

    def all_to_all(
        self,
        stream: int,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
    ) -> bool:
        """See `TensorCollectives.all_to_all`."""
        if not type(output) is type(given) is torch.Tensor:
            return False
        received, sent = plain_tensor(output), plain_tensor(given)
        if received is None or sent is None or received[2] != sent[2]:
            return False
        into = self._counts_of(output, received[1], output_splits)
        out_of = self._counts_of(given, sent[1], input_splits)
        if into is None or out_of is None:
            return False
        return self._enqueue(ALLTOALLV, stream, in_blocks(sent, out_of), in_blocks(received, into))

    def _counts_of(self, tensor: torch.Tensor, total: int, splits: Sequence[int]) -> tuple[int, ...] | None:
        """Return the elements for each rank of a tensor with ``total`` elements; None for wrong splits.

        The plan of the form refuses negative counts.
        """
        size, dimensions = self._size, tensor.dim()
        rows = total if dimensions == 1 else tensor.shape[0] if dimensions else 1
        if not splits:
            return None if rows % size else (total // size,) * size
        counts = tuple(splits)
        if sum(counts) != rows or len(counts) != size:
            return None
        if dimensions == 1:
            return counts
        of_row = total // rows if rows else 0
        return tuple([count * of_row for count in counts])

    def _enqueue(
        self,
        operation: Operation,
        stream: int,
        sent: PlainArray | PlainBlocks,
        received: PlainArray | PlainBlocks,
        op: Any = None,
        root: int = 0,
        finish: Any = (),
    ) -> bool:
        # A communicator with methods that record calls has another class. A freed communicator has another class, too.
        if type(self._comm) is not Communicator:
            return False
        gpu = self._comm._collectives.engines.gpu
        if gpu is None:
            return False
        known = gpu.find_plain(operation, "auto", sent, received, op, root, finish)
        if known is None:
            return False
        gpu.enqueue_at(known, stream)
        return True
